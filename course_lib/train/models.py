"""Three models, small enough for a laptop: an MLP and a CNN for digits, a transformer for text.

None of them has BatchNorm: its statistics cover only the rows of *one rank*, so a step on K ranks
would differ from a step on one machine with the whole batch. LayerNorm uses one example at a time.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from course_lib.train.config import TrainConfig

PIXELS = 8
"""Height and width of a digit."""
CLASSES = 10
"""The digits 0 to 9."""
VOCABULARY = 256
"""The transformer reads and predicts bytes."""


def build_model(config: TrainConfig) -> nn.Module:
    """Return the model that `config` names, initialised with PyTorch's current random numbers.

    `mlp` and `cnn` take images of shape (B, 64) and return logits of shape (B, 10); `transformer`
    takes bytes, integers of shape (B, T) with T <= context, and returns logits (B, T, 256).
    """
    if config.model == "mlp":
        return _mlp(config.width, config.layers, config.dropout)
    if config.model == "cnn":
        return _cnn(config.width, config.layers, config.dropout)
    return Transformer(config.width, config.layers, config.heads, config.context, config.dropout)


def _mlp(width: int, layers: int, dropout: float) -> nn.Module:
    sizes = [PIXELS * PIXELS, *[width] * layers]
    modules: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        modules += [nn.Linear(inputs, outputs), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*modules, nn.Linear(width, CLASSES))


def _cnn(channels: int, layers: int, dropout: float) -> nn.Module:
    sizes = [1, *[channels] * layers]
    modules: list[nn.Module] = [nn.Unflatten(1, (1, PIXELS, PIXELS))]
    for inputs, outputs in pairwise(sizes):
        modules += [nn.Conv2d(inputs, outputs, kernel_size=3, padding=1), nn.ReLU()]
    features = channels * (PIXELS // 2) ** 2
    return nn.Sequential(
        *modules, nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(dropout), nn.Linear(features, CLASSES)
    )


class Block(nn.Module):
    """One transformer block: x + attention(norm(x)), then x + mlp(norm(x)).

    Input and output have the shape (B, T, width).

    Normalising *before* each part leaves an unbroken path for the gradient (A. Radford et al.,
    "Language Models are Unsupervised Multitask Learners", 2019), so training needs no warm-up.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._dropped(self._attention(self.attention_norm(x)))
        return x + self._dropped(self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)))))

    def _attention(self, x: Tensor) -> Tensor:
        """Return softmax(q kᵀ/√d + mask) v for each head; no position sees a later one."""
        batch, length, width = x.shape
        split = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each (B, heads, T, width/heads)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class Transformer(nn.Module):
    """A decoder-only transformer: it predicts the next byte at every position of a text.

    Takes bytes, integers of shape (B, T) with T <= context; returns logits of shape (B, T, 256).

    The embedding is also the output layer, a *tied* weight (O. Press and L. Wolf, "Using the Output
    Embedding to Improve Language Models", 2017): one parameter, one gradient, used twice.

    A. Vaswani et al., "Attention Is All You Need", 2017.
    """

    def __init__(self, width: int, layers: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.empty(context, width))
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, VOCABULARY, bias=False)
        self.output.weight = self.embedding.weight
        self._initialise(layers)

    def _initialise(self, layers: int) -> None:
        """Draw weights with standard deviation 0.02.

        It is smaller for the layers whose outputs, 2·layers of them, are added up.
        """
        for name, param in self.named_parameters():
            if param.dim() > 1:
                into_residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(param, std=0.02 / math.sqrt(2 * layers) if into_residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(param)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text.int()) + self.position[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.output(self.norm(x))
        return logits


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats, a scalar.

    Logits have the shape (…, classes). Targets are integers of shape (…).
    """
    # Compute in full precision: bf16 has only 8 significant bits, and people compare losses.
    flat = logits.flatten(0, -2)
    full = flat.float() if flat.dtype in (torch.bfloat16, torch.float16) else flat
    return F.cross_entropy(full, targets.flatten().long())
