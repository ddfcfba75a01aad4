"""A schedule: the steps of every rank of a pipeline, in order, as data.

    >>> from course_lib.pipeline_parallel import gpipe
    >>> print(gpipe(2, micro_batches=3))
    rank 0: F0 F1 F2 B2 B1 B0
    rank 1: F0 F1 F2 B2 B1 B0

The layers of a model are cut into stages. Stage s needs the output of stage s - 1 for its forward,
and the gradient that stage s + 1 computes for its backward. A batch is cut into m micro-batches, so
that stages have something to do at the same time:

    rank 0   F0 F1 F2 .. .. B2 .. B1 .. B0
    rank 1   .. F0 F1 F2 B2 .. B1 .. B0 ..        → time

A list of steps for each rank defines all of this. The dots follow from it, because a rank waits
until it has its input. There are four kinds of steps:

- `F`: forward of a micro-batch;
- `B`: its whole backward;
- `I` and `W`: its backward in two halves. `I` computes the gradient of the input, for which the
  stage before waits. `W` computes the gradients of the weights, for which no rank waits before the
  optimizer's step.

A rank may hold several stages, its chunks: with p ranks, chunk c of rank r is stage cp + r. A step
of any chunk except the first has a letter, as in F0b.
"""

from typing import Literal, NamedTuple

Action = Literal["F", "B", "I", "W"]


class Step(NamedTuple):
    """One step of a rank: `action` for a micro-batch on one of its chunks; both count from 0."""

    action: Action
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.action}{self.label}"

    @property
    def label(self) -> str:
        """The micro-batch, and the chunk if it is not the first: ``3`` or ``3b``."""
        return f"{self.micro_batch}{chr(ord('a') + self.chunk) if self.chunk else ''}"


class Work(NamedTuple):
    """A step by its stage in the model; the stage determines the rank."""

    action: Action
    micro_batch: int
    stage: int


class Schedule(NamedTuple):
    """The steps of every rank.

    Attributes:
        name: a readable name.
        micro_batches: m, the number of micro-batches in a batch.
        steps: ``steps[r]`` are the steps of rank r, in order.
        chunks: v, how many stages each rank holds.

    """

    name: str
    micro_batches: int
    steps: tuple[tuple[Step, ...], ...]
    chunks: int = 1

    @property
    def world_size(self) -> int:
        """The number p of ranks."""
        return len(self.steps)

    @property
    def stages(self) -> int:
        """The number pv of stages."""
        return self.world_size * self.chunks

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds a stage."""
        return stage % self.world_size

    def work(self, rank: int, step: Step) -> Work:
        """Return the step of a rank as `Work`, by its stage in the model."""
        return Work(step.action, step.micro_batch, step.chunk * self.world_size + rank)

    def step(self, work: Work) -> Step:
        """Return `work` as the `Step` of the rank that holds its stage; the inverse of `work()`."""
        return Step(work.action, work.micro_batch, work.stage // self.world_size)

    @property
    def splits_backward(self) -> bool:
        """Whether backward runs in two halves."""
        return any(step.action == "W" for steps in self.steps for step in steps)

    def needs(self, work: Work) -> list[Work]:
        """Return the work that must be over before `work` can begin."""
        action, micro_batch, stage = work
        if action == "F":
            return [work._replace(stage=stage - 1)] if stage else []
        if action == "W":
            return [work._replace(action="I")]
        after = [work._replace(stage=stage + 1)] if stage < self.stages - 1 else []
        return [Work("F", micro_batch, stage), *after]

    def __str__(self) -> str:
        return "\n".join(
            f"rank {rank}: {' '.join(map(str, steps))}" for rank, steps in enumerate(self.steps)
        )
