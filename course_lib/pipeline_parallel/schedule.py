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

A list of steps for each rank says all of this: the dots follow from it, since a rank that has not
got its input waits. Four kinds of steps:

- `F`: forward of a micro-batch;
- `B`: its whole backward;
- `I` and `W`: the same in two halves. `I` computes the gradient of the input, for which the stage
  before waits; `W` those of the weights, for which nobody waits until the optimizer steps.

A rank may hold several stages, its chunks: with p ranks, chunk c of rank r is stage cp + r. A step
of another chunk than the first has a letter, as in F0b.
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
    """A step by its place in the model: which rank it is on follows from the stage."""

    action: Action
    micro_batch: int
    stage: int


class Schedule(NamedTuple):
    """The steps of every rank.

    Attributes:
        name: for people.
        micro_batches: m, how many a batch is cut into.
        steps: ``steps[r]`` are those of rank r, in their order.
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
        """Return the step of a rank by its place in the model."""
        return Work(step.action, step.micro_batch, step.chunk * self.world_size + rank)

    def step(self, work: Work) -> Step:
        """Return the opposite of `work`: as the rank that holds the stage knows it."""
        return Step(work.action, work.micro_batch, work.stage // self.world_size)

    @property
    def splits_backward(self) -> bool:
        """Whether backward is done in two halves."""
        return any(step.action == "W" for steps in self.steps for step in steps)

    def needs(self, work: Work) -> list[Work]:
        """Return what must be over before `work` can begin."""
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
