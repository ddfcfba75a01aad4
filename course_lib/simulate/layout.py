"""A layout: how a model and its batch are divided over K ranks.

K = tensor · context · data · pipeline.

Ranks of a tensor-parallel group have consecutive numbers. The next dimensions are the ranks that
share a sequence, the ranks of a data-parallel group, and the stages of a pipeline. So the groups
that send most stay inside a node. An expert-parallel group is part of a data-parallel group. ZeRO
divides over all ranks that hold the same weights: those of `data` and `context`.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from course_lib.simulate.transformer import Transformer

Recompute = Literal["none", "selective", "full"]


class LayoutError(ValueError):
    """A layout's numbers do not fit together, or do not fit its model."""


_COUNTS = (
    *("data", "tensor", "pipeline", "context"), *("expert", "batch", "micro_batch", "chunks"),
)  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism, and settings that belong to them.

    Args:
        data: replicas, or shards of one replica.
        tensor: ranks that share each matrix.
        pipeline: ranks that share the layers.
        expert: ranks that share the experts of a layer; divides `data`.
        zero: stage of ZeRO over the data-parallel ranks: 0 (DDP) to 3.
        batch: sequences of a step, of all ranks together.
        micro_batch: sequences that one replica processes at a time.
        chunks: stages of each rank. The pipeline's schedule is 1F1B with one stage, and
            interleaved with several.
        recompute: which activations are computed again: none, those of attention, or all.
        sequence_parallel: whether activations that `tensor` does not divide are divided along the
            sequence.
        overlap: whether gradients, and weights with ZeRO-3, are sent during computation.
        bucket: bytes of a bucket of gradients.
        gradient_bytes: bytes of one gradient number, when it is added up and when it is sent.
        context: ranks that share each sequence; they gather one another's keys and values.
        shard: ranks over which ZeRO divides; each such group is a replica (HSDP). None: all ranks.
        recomputed: the share of the layers in which `recompute` applies.
        tensor_overlap: whether tensor-parallel collectives run during the products around them.
        eager: whether operations between matrix products run one by one, without a compiler or
            kernels written for several of them.

    Raises:
        LayoutError: the numbers do not fit together; the message says what to change.

    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    zero: int = 0
    batch: int = 1
    micro_batch: int = 1
    chunks: int = 1
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    overlap: bool = True
    bucket: float = 25 * 2**20
    gradient_bytes: float = 2
    context: int = 1
    shard: int | None = None
    recomputed: float = 1.0
    tensor_overlap: bool = False
    eager: bool = False

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise LayoutError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.zero not in (0, 1, 2, 3):
            raise LayoutError(f"zero must be a stage of ZeRO, 0 to 3, got {self.zero}")
        if self.data % self.expert:
            raise LayoutError(f"expert={self.expert} does not divide data={self.data}")
        if self.batch % (self.data * self.micro_batch):
            raise LayoutError(
                f"batch={self.batch} cannot be divided into micro-batches of {self.micro_batch} on "
                f"{self.data} replicas: use a multiple of {self.data * self.micro_batch}"
            )
        if self.recompute not in get_args(Recompute):
            raise LayoutError(f"recompute must be one of {', '.join(get_args(Recompute))}")
        if self.chunks > 1 and self.micro_batches % self.pipeline:
            raise LayoutError(
                f"chunks={self.chunks}, the interleaved schedule, needs a multiple of "
                f"{self.pipeline} micro-batches, got {self.micro_batches}"
            )
        if self.zero == 3 and self.pipeline > 1:
            raise LayoutError(
                "with a pipeline, ZeRO-3 would gather a stage's weights for every micro-batch: "
                "use zero=2 or less"
            )
        if self.shard is not None and (self.shard < 1 or self.holders % self.shard):
            raise LayoutError(
                f"shard={self.shard} does not divide the {self.holders} ranks with the same weights"
            )
        if not 0 <= self.recomputed <= 1:
            raise LayoutError(f"recomputed={self.recomputed} must be a share, 0 to 1")
        if self.bucket <= 0 or self.gradient_bytes <= 0:
            raise LayoutError("bucket and gradient_bytes must be above 0")

    @property
    def ranks(self) -> int:
        """K, the number of ranks."""
        return self.tensor * self.context * self.data * self.pipeline

    @property
    def holders(self) -> int:
        """The number of ranks that hold, or share, the same weights: `data` times `context`."""
        return self.data * self.context

    @property
    def shards(self) -> int:
        """The number of ranks over which ZeRO divides."""
        return self.shard or self.holders

    @property
    def sequences(self) -> float:
        """Sequences of a micro-batch on one rank, as a fraction if `context` divides them."""
        return self.micro_batch / self.context

    @property
    def micro_batches(self) -> int:
        """m, the number of micro-batches of a replica in one step."""
        return self.batch // (self.data * self.micro_batch)

    @property
    def stages(self) -> int:
        """The number of parts into which the layers are cut."""
        return self.pipeline * self.chunks

    @property
    def backward_collectives(self) -> float:
        """Collectives of one kind in a layer's backward, with those of a recomputed forward."""
        return 2 + 2 * self.recomputed if self.recompute == "full" else 2

    def layers_of_a_rank(self, model: Transformer) -> int:
        """Return the number of layers on the rank that has the most.

        Raises:
            LayoutError: the model cannot be divided like this.

        """
        if model.width % self.tensor or model.heads % self.tensor:
            raise LayoutError(
                f"tensor={self.tensor} must divide width={model.width} and heads={model.heads}"
            )
        # With several stages per rank, the first and the last may have no layer at all.
        if self.stages > model.layers + (2 if self.chunks > 1 else 0):
            raise LayoutError(f"{model.layers} layers are too few for {self.stages} stages")
        if model.sequence % self.context:
            raise LayoutError(f"context={self.context} does not divide {model.sequence} tokens")
        if model.experts % self.expert:
            raise LayoutError(f"expert={self.expert} does not divide {model.experts} experts")
        return -(-model.layers // self.stages) * self.chunks
