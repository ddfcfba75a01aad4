"""A layout: how a model is spread over K = data · tensor · pipeline ranks, and in what portions.

Ranks are numbered so that those of a tensor-parallel group are neighbours, then those of a data
parallel group, then the stages of a pipeline: what sends most stays inside a node. An expert's
group lies inside the data-parallel one.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from course_lib.pipeline_parallel import (
    Schedule,
    gpipe,
    interleaved,
    one_forward_one_backward,
    zero_bubble,
)
from course_lib.simulate.transformer import Transformer

ScheduleName = Literal["1f1b", "gpipe", "interleaved", "zero-bubble"]
Recompute = Literal["none", "selective", "full"]


class LayoutError(ValueError):
    """A layout that does not fit together, or does not fit its model."""


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism and what goes with them.

    Args:
        data: replicas, or shards of one.
        tensor: ranks that share each matrix.
        pipeline: ranks that share the layers.
        expert: ranks that share the experts of a layer; divides `data`.
        zero: stage of ZeRO over the data-parallel ranks: 0 (DDP) to 3.
        batch: sequences of a step, of all ranks together.
        micro_batch: sequences that one replica takes at a time.
        schedule: of the pipeline.
        chunks: stages of each rank, for the schedule "interleaved".
        recompute: which activations are computed again: none, those of attention, or all.
        sequence_parallel: whether what `tensor` does not divide is divided along the sequence.
        overlap: whether gradients leave during backward.
        bucket: bytes of a bucket of gradients.
        gradient_bytes: of one number of a gradient, on the wire.

    Raises:
        LayoutError: numbers that do not go together, with what to change.

    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    zero: int = 0
    batch: int = 1
    micro_batch: int = 1
    schedule: ScheduleName = "1f1b"
    chunks: int = 1
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    overlap: bool = True
    bucket: float = 25 * 2**20
    gradient_bytes: float = 2

    def __post_init__(self) -> None:
        for name in ("data", "tensor", "pipeline", "expert", "batch", "micro_batch", "chunks"):
            if getattr(self, name) < 1:
                raise LayoutError(f"{name} is at least 1, got {getattr(self, name)}")
        if self.zero not in (0, 1, 2, 3):
            raise LayoutError(f"zero is a stage of ZeRO, 0 to 3, got {self.zero}")
        if self.data % self.expert:
            raise LayoutError(f"expert={self.expert} does not divide data={self.data}")
        if self.batch % (self.data * self.micro_batch):
            raise LayoutError(
                f"a batch of {self.batch} is not made of {self.data} replicas' micro-batches of "
                f"{self.micro_batch}: take a multiple of {self.data * self.micro_batch}"
            )
        if self.schedule not in get_args(ScheduleName):
            raise LayoutError(f"schedule is one of {', '.join(get_args(ScheduleName))}")
        if self.recompute not in get_args(Recompute):
            raise LayoutError(f"recompute is one of {', '.join(get_args(Recompute))}")
        if self.schedule == "interleaved" and self.micro_batches % self.pipeline:
            raise LayoutError(
                f"interleaving takes {self.pipeline} micro-batches at a time, which do not divide "
                f"{self.micro_batches}"
            )
        if self.chunks > 1 and self.schedule != "interleaved":
            raise LayoutError(f"chunks={self.chunks} needs schedule='interleaved'")
        if self.zero == 3 and self.pipeline > 1:
            raise LayoutError(
                "with a pipeline, ZeRO-3 would gather a stage's weights for every micro-batch: "
                "take zero=2 at most"
            )
        if self.bucket <= 0 or self.gradient_bytes <= 0:
            raise LayoutError("a bucket and a number of a gradient have more than 0 bytes")

    @property
    def ranks(self) -> int:
        """K, the number of ranks."""
        return self.data * self.tensor * self.pipeline

    @property
    def micro_batches(self) -> int:
        """m, how many micro-batches a replica takes in one step."""
        return self.batch // (self.data * self.micro_batch)

    @property
    def stages(self) -> int:
        """Parts that the layers are cut into."""
        return self.pipeline * self.chunks

    @property
    def backward_collectives(self) -> int:
        """Of a layer and one kind: two, and those of forward again if all is computed again."""
        return 4 if self.recompute == "full" else 2

    def steps(self) -> Schedule:
        """Return the schedule: what each rank of the pipeline does, in which order."""
        if self.schedule == "interleaved":
            return interleaved(self.pipeline, self.micro_batches, self.chunks)
        make = {"gpipe": gpipe, "1f1b": one_forward_one_backward, "zero-bubble": zero_bubble}
        return make[self.schedule](self.pipeline, self.micro_batches)

    def layers_of_a_rank(self, model: Transformer) -> int:
        """Return the layers of the rank that has most of them.

        Raises:
            LayoutError: the model cannot be cut so.

        """
        if model.width % self.tensor or model.heads % self.tensor:
            raise LayoutError(
                f"tensor={self.tensor} does not divide width {model.width} or {model.heads} heads"
            )
        if self.stages > model.layers:
            raise LayoutError(f"{self.stages} stages for {model.layers} layers: some are empty")
        if model.experts % self.expert:
            raise LayoutError(f"expert={self.expert} does not divide {model.experts} experts")
        return -(-model.layers // self.stages) * self.chunks
