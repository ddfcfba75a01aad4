"""Compute the time of a schedule, the idle time of a rank, and the activations it holds.

    >>> from course_lib.pipeline_parallel import bubble_fraction, gpipe, simulate
    >>> run = simulate(gpipe(4, micro_batches=8))
    >>> f"{run.bubble:.4f} simulated, {bubble_fraction(4, 8):.4f} by the formula"
    '0.2727 simulated, 0.2727 by the formula'

A step begins when its rank is free and its input has arrived. So every step's time follows from the
times of the steps that it needs, and nothing is executed. The *bubble* is the share of all ranks'
time in which they wait. Rank r gets its first input r forwards late, and its last gradient
p - 1 - r backwards after the last rank. So a step of m micro-batches uses m times F + B seconds and
loses p - 1 times F + B seconds:

    bubble  (p-1) / (m + p-1)        interleaved, v chunks  (p-1) / (vm + p-1)

The papers give the ratio to the working time, (p-1)/m, which is above 1 for m < p - 1.

Y. Huang et al., 2019; D. Narayanan et al., 2021; P. Qi et al., 2024 (see `schedules`).
"""

from typing import NamedTuple

from course_lib.pipeline_parallel.schedule import Schedule, Step, Work

Span = tuple[int, str, float, float, str]
"""`(rank, lane, start, stop, label)`, as `course_lib.figures.timelines` draws it."""

_LANES = {"F": "forward", "B": "backward", "I": "backward", "W": "weights' gradients"}


class Simulation(NamedTuple):
    """When every step of a schedule runs, in seconds from the start, and which steps cannot run."""

    spans: list[Span]
    world_size: int
    stuck: dict[int, Step]
    """Rank → the step that it can never begin; empty unless there is a deadlock."""

    @property
    def makespan(self) -> float:
        """Seconds until the last rank is done."""
        return max((span[3] for span in self.spans), default=0.0)

    def busy(self, rank: int) -> float:
        """Return how many seconds a rank computes."""
        return sum(stop - start for r, _, start, stop, _ in self.spans if r == rank)

    @property
    def bubble(self) -> float:
        """The share of the ranks' time, from the first start to the last end, that is idle."""
        work = sum(self.busy(rank) for rank in range(self.world_size))
        return 1 - work / (self.world_size * self.makespan)

    @property
    def steady_bubble(self) -> float:
        """The idle share of the rank that takes longest from its own first step to its last.

        This share matters if ranks begin the next step as soon as they are done with this one.
        """
        longest, rank = max(
            (max(span[3] for span in own_spans) - min(span[2] for span in own_spans), rank)
            for rank in range(self.world_size)
            if (own_spans := [span for span in self.spans if span[0] == rank])
        )
        return 1 - self.busy(rank) / longest


def simulate(
    schedule: Schedule, forward: float = 1.0, backward: float = 2.0, *, message: float = 0.0
) -> Simulation:
    """Simulate a schedule, and return when each of its steps runs.

    `forward` and `backward` are the seconds of one micro-batch on one rank; with v chunks, each
    chunk takes 1/v of that. `I` and `W` take half of `backward` each. A message takes
    `message` seconds, in which its sender can go on. If ranks wait for one another for ever, the
    simulation ends, and `stuck` names their steps.
    """
    seconds = {"F": forward, "B": backward, "I": backward / 2, "W": backward / 2}
    ends: dict[Work, float] = {}
    free = [0.0] * schedule.world_size
    position = [0] * schedule.world_size
    spans: list[Span] = []
    progress = True
    while progress:
        progress = False
        for rank, steps in enumerate(schedule.steps):
            while position[rank] < len(steps):
                step = steps[position[rank]]
                work = schedule.work(rank, step)
                needed = schedule.needs(work)
                if not all(requirement in ends for requirement in needed):
                    break
                late = (
                    ends[requirement] + message * (schedule.rank_of(requirement.stage) != rank)
                    for requirement in needed
                )
                start = max(free[rank], *late, 0.0)
                free[rank] = ends[work] = start + seconds[step.action] / schedule.chunks
                spans.append((rank, _LANES[step.action], start, free[rank], step.label))
                position[rank] += 1
                progress = True
    stuck = {
        rank: steps[position[rank]]
        for rank, steps in enumerate(schedule.steps)
        if position[rank] < len(steps)
    }
    return Simulation(spans, schedule.world_size, stuck)


def peak_activations(schedule: Schedule) -> list[int]:
    """Return for each rank the largest number of micro-batches whose activations it holds at once.

    The activations of a micro-batch in one chunk count as one. They are held from forward until
    backward is over. If backward is in halves, they are held until `W`, although `I` frees a part.
    """
    last = "W" if schedule.splits_backward else "B"
    peaks = []
    for steps in schedule.steps:
        held = peak = 0
        for step in steps:
            held += (step.action == "F") - (step.action == last)
            peak = max(peak, held)
        peaks.append(peak)
    return peaks


def bubble_fraction(world_size: int, micro_batches: int, chunks: int = 1) -> float:
    """Return (p-1) / (vm + p-1): the bubble of GPipe, 1F1B and, with v = `chunks`, interleaved."""
    return (world_size - 1) / (chunks * micro_batches + world_size - 1)


def zero_bubble_fraction(
    world_size: int, micro_batches: int, forward: float, backward: float, weight: float
) -> float:
    """Return b / (m (F + B) + b) with b = (p-1) (F + I - W), I = B - W: the bubble of H1."""
    lost = (world_size - 1) * (forward + backward - 2 * weight)
    return lost / (micro_batches * (forward + backward) + lost)
