"""A transformer as numbers: parameters, floating-point operations and bytes of activations.

    >>> from course_lib.simulate import Transformer
    >>> gpt3 = Transformer(layers=96, width=12288, heads=96, vocabulary=51200)
    >>> f"{gpt3.parameters / 1e9:.1f} billion"
    '174.6 billion'

With h = `width`, s = `sequence`, f = `hidden` and n tokens, one layer's forward takes

    2n (2h² + 2hk + 2hf) + 4nsh       k = h · kv_heads / heads, 3hf instead of 2hf if `gated`

operations. The last term is attention itself (half of it if a fused kernel skips what the causal
mask hides). Backward takes twice as much; a fused kernel's takes 2.5 times as much, because it
computes the scores again. For backward, a layer keeps

    s·b·h (10 + 24 + 5as/h) bytes     for b sequences, a heads and f = 4h, in 2-byte numbers

Tensor parallelism over t ranks divides all of these except the 10; two of the 10 are dropout masks.
The last term is attention's matrix of scores, which a fused kernel never writes. Biases and norms
are left out: they are less than 0.1 % of the parameters.

Operations between matrix products move bytes and compute almost nothing. If each kernel reads its
inputs once and writes its outputs once, a forward moves per token

    norms          2 · 4h          read and write h numbers
    residual sums  2 · 6h          read two, write one (7h with dropout: its mask)
    activation     4f              6f if `gated`
    scores, if a kernel writes them: 13 · a · s for the mask, softmax, dropout and both products

bytes, and a backward moves twice as much (19 · a · s for the scores).

V. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022,
sections 4.1 and 4.2, and appendix A.
"""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Transformer:
    """The shape of a decoder.

    Args:
        layers: transformer layers, each with attention and an MLP.
        width: h, numbers per token between layers.
        heads: attention heads.
        vocabulary: rows of the embedding, and of the output layer.
        sequence: tokens of one sequence.
        hidden: width inside the MLP; 4h if None.
        kv_heads: heads of keys and values; as many as `heads` if None.
        gated: whether the MLP has a third matrix, as SwiGLU does.
        fused_attention: whether scores stay inside one kernel, as in FlashAttention.
        tied: whether embedding and output layer are one matrix.
        dropout: whether dropout masks are kept for backward.
        parallel: whether attention and MLP both use the output of one norm, and add into one sum.
        experts: MLPs of a layer; each token chooses among them.
        top_k: how many experts a token uses.

    Raises:
        ValueError: a number is below 1, or a token uses more experts than there are.

    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    sequence: int = 2048
    hidden: int | None = None
    kv_heads: int | None = None
    gated: bool = False
    fused_attention: bool = False
    tied: bool = True
    dropout: bool = True
    parallel: bool = False
    experts: int = 1
    top_k: int = 1

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "vocabulary", "sequence", "experts", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.top_k > self.experts:
            raise ValueError(f"top_k={self.top_k} is more than experts={self.experts}")

    @cached_property
    def attention_parameters(self) -> int:
        """Parameters of one layer's attention: queries and output, keys and values."""
        return 2 * self.width**2 + 2 * self.width * self.keys

    @property
    def keys(self) -> int:
        """k, numbers per token of the keys, and of the values."""
        return self.width * (self.kv_heads or self.heads) // self.heads

    @cached_property
    def expert_parameters(self) -> int:
        """Parameters of one MLP of one layer; a layer has `experts` of them."""
        return (3 if self.gated else 2) * self.width * self.mlp_width

    @property
    def mlp_width(self) -> int:
        """f, the width inside the MLP."""
        return self.hidden or 4 * self.width

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer, all its experts included."""
        return self.attention_parameters + self.experts * self.expert_parameters

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding; the output layer has as many, or is the same matrix."""
        return self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return self.layers * self.layer_parameters + (2 - self.tied) * self.embedding_parameters

    def layer_flops(self, sequences: float) -> tuple[float, float]:
        """Return the operations of one layer's forward, and attention's part of them."""
        tokens = sequences * self.sequence
        matrices = self.attention_parameters + self.top_k * self.expert_parameters
        attention = 4 * tokens * self.sequence * self.width * (0.5 if self.fused_attention else 1)
        return 2 * tokens * matrices + attention, attention

    def output_flops(self, sequences: float) -> float:
        """Return the operations of the output layer's forward."""
        return 2 * sequences * self.sequence * self.embedding_parameters

    def model_flops(self, sequences: float) -> float:
        """Return 3 times the forward's operations, the basis of utilisation (MFU).

        Attention counts in full and recomputation does not count, for all kernels, as in
        A. Chowdhery et al., "PaLM", 2022, appendix B.
        """
        layer, attention = self.layer_flops(sequences)
        skipped = attention if self.fused_attention else 0.0
        return 3 * (self.layers * (layer + skipped) + self.output_flops(sequences))

    def product_bytes(self, sequences: float, tensor: int) -> float:
        """Return the bytes that one layer's products read and write on one of `tensor` ranks.

        Each product reads two matrices and writes one. The products with attention's scores are not
        included: see `scores_moved`.
        """
        tokens = sequences * self.sequence
        rows = tokens * (self.top_k if self.experts > 1 else 1)
        weights = self.attention_parameters + self.experts * self.expert_parameters
        attention = 2 * self.width + (2 * self.width + 2 * self.keys) / tensor
        mlp = 2 * self.width + (3 if self.gated else 2) * self.mlp_width / tensor
        return 2 * (weights / tensor + tokens * attention + rows * mlp)

    def elementwise_bytes(self, sequences: float, tensor: int, sequence_parallel: bool) -> float:
        """Return the bytes that one layer's forward moves between its matrix products."""
        tokens = sequences * self.sequence
        divided = (6 if self.gated else 4) * self.mlp_width * self.top_k
        undivided = (11 if self.dropout else 10) * (1 if self.parallel else 2) * self.width
        return tokens * (undivided / (tensor if sequence_parallel else 1) + divided / tensor)

    def scores_moved(self, sequences: float, tensor: int) -> tuple[float, float]:
        """Return the bytes that attention's scores move in a forward and in a backward."""
        if self.fused_attention:
            return 0.0, 0.0
        numbers = sequences * self.sequence**2 * self.heads / tensor
        return 13 * numbers, 19 * numbers

    def activation_bytes(self, sequences: float, tensor: int, sequence_parallel: bool) -> float:
        """Return the bytes that one layer keeps for backward on one of `tensor` ranks."""
        tokens = sequences * self.sequence
        mlp = self.top_k * (self.mlp_width * (6 if self.gated else 4))
        # inputs of both blocks and norms, and masks of both dropouts
        undivided = (5 if self.dropout else 4) * (1 if self.parallel else 2) * self.width
        divided = 4 * self.width + 4 * self.keys + mlp + self.scores_bytes
        return tokens * (undivided / (tensor if sequence_parallel else 1) + divided / tensor)

    def boundary_bytes(self, sequences: float) -> float:
        """Return the bytes that one layer passes to the next: 2 per number."""
        return 2.0 * sequences * self.sequence * self.width

    @property
    def blocks(self) -> int:
        """The number of sums over a tensor-parallel group in one layer's forward."""
        return 1 if self.parallel else 2

    @property
    def scores_bytes(self) -> float:
        """Bytes per token and layer of attention's scores, their softmax and its mask."""
        return 0.0 if self.fused_attention else 5.0 * self.heads * self.sequence
