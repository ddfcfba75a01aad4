"""Four schedules: from all forwards first to a pipeline that hardly ever waits.

    >>> from course_lib.pipeline_parallel import one_forward_one_backward
    >>> print(one_forward_one_backward(3, micro_batches=4))
    rank 0: F0 F1 F2 B0 F3 B1 B2 B3
    rank 1: F0 F1 B0 F2 B1 F3 B2 B3
    rank 2: F0 B0 F1 B1 F2 B2 F3 B3

With p ranks, m micro-batches, and F, B = I + W seconds for the forward and the backward of one
micro-batch on one rank, a rank is idle for

    GPipe                    (p-1) (F + B)         and holds m micro-batches' activations
    one forward one backward (p-1) (F + B)         at most p: p - r on rank r
    interleaved, v chunks    (p-1) (F + B) / v     up to 2(p-1) + (v-1)p + 1, each 1/v as large
    zero bubble H1           (p-1) (F + I - W)     at most p
    zero bubble H2           (p-1) (F + I - 2W)    at most 2p - 1

seconds of a step. The first two differ only in memory. The third sends v times as often. The last
two fill the idle time with W, for which no rank waits. The number of H2 counts each rank from its
own first to its own last step, because the ranks then begin their next step one after the other.
Zero bubble needs m ≥ p micro-batches (H2 needs 2p - 1), and halves of about the same length.

Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
NeurIPS 2019; D. Narayanan et al., "PipeDream", SOSP 2019, and "Efficient Large-Scale Language Model
Training on GPU Clusters Using Megatron-LM", SC 2021 (interleaved); P. Qi et al., "Zero Bubble
Pipeline Parallelism", ICLR 2024.
"""

from itertools import count

from course_lib.pipeline_parallel.schedule import Action, Schedule, Step
from course_lib.pipeline_parallel.simulation import bubble_fraction


def gpipe(world_size: int, micro_batches: int) -> Schedule:
    """Return all forwards, then all backwards, the last micro-batch first."""
    forwards = [Step("F", m) for m in range(micro_batches)]
    backwards = [Step("B", m) for m in reversed(range(micro_batches))]
    return Schedule("GPipe", micro_batches, ((*forwards, *backwards),) * world_size)


def one_forward_one_backward(world_size: int, micro_batches: int) -> Schedule:
    """Return p - r forwards on rank r, then backwards and forwards in turn, each when possible."""
    forwards = [Step("F", m) for m in range(micro_batches)]
    backwards = [Step("B", m) for m in range(micro_batches)]
    steps = tuple(
        _in_turn(forwards, backwards, world_size - rank - 1) for rank in range(world_size)
    )
    return Schedule("one forward one backward", micro_batches, steps)


def pipeline_schedule(world_size: int, bubble: float) -> list[list[tuple[Action, int]]]:
    """Return one forward one backward with as few micro-batches as `bubble` allows.

    The steps of each rank are (action, micro-batch). `bubble` is the largest share (p-1) / (m+p-1)
    of its time in which a rank may wait; it is above 0, except for one rank.
    """
    m = next(m for m in count(1) if bubble_fraction(world_size, m) <= bubble)
    ranks = one_forward_one_backward(world_size, m).steps
    return [[(step.action, step.micro_batch) for step in steps] for steps in ranks]


def interleaved(world_size: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """Return one forward one backward on `chunks` v of every rank, p micro-batches at a time.

    A micro-batch passes every rank v times. The number of steps to fill the pipeline is the same,
    but each step is 1/v as long. Raises ValueError if p does not divide m, because a last, smaller
    turn would stall.
    """
    if micro_batches % world_size:
        raise ValueError(
            f"interleaving takes {world_size} micro-batches at a time, one for each rank, so "
            f"micro_batches must be a multiple of {world_size}; got {micro_batches}"
        )
    # In one turn: p micro-batches on the first chunk, the same ones on the second, …
    order = [
        (turn + m, chunk)
        for turn in range(0, micro_batches, world_size)
        for chunk in range(chunks)
        for m in range(world_size)
    ]
    forwards = [Step("F", m, chunk) for m, chunk in order]
    backwards = [Step("B", m, chunks - 1 - chunk) for m, chunk in order]
    steps = tuple(
        _in_turn(forwards, backwards, 2 * (world_size - rank - 1) + (chunks - 1) * world_size)
        for rank in range(world_size)
    )
    return Schedule("interleaved", micro_batches, steps, chunks)


def zero_bubble(world_size: int, micro_batches: int, ahead: int = 1) -> Schedule:
    """Return one forward one backward with backward in halves: H1, or H2 with `ahead` = 2.

    Rank r begins with `ahead` forwards for each rank after it, and postpones `ahead` steps `W` for
    each rank before it. So each rank holds up to ahead (p-1) + 1 micro-batches, and ranks that end
    early still have work.
    """
    forwards = [Step("F", m) for m in range(micro_batches)]
    inputs = [Step("I", m) for m in range(micro_batches)]
    ranks = []
    for rank in range(world_size):
        steps: list[Step] = []
        for step in _in_turn(forwards, inputs, ahead * (world_size - rank - 1)):
            steps.append(step)
            if step.action == "I" and step.micro_batch >= ahead * rank:
                steps.append(Step("W", step.micro_batch - ahead * rank))
        finished = sum(step.action == "W" for step in steps)
        ranks.append((*steps, *(Step("W", m) for m in range(finished, micro_batches))))
    return Schedule("zero bubble", micro_batches, tuple(ranks))


def _in_turn(forwards: list[Step], backwards: list[Step], ahead: int) -> tuple[Step, ...]:
    """Return `ahead` forwards, then a forward and a backward in turn, then the other backwards."""
    ahead = min(ahead, len(forwards))
    pairs = zip(forwards[ahead:], backwards, strict=False)
    remaining = backwards[len(forwards) - ahead :]
    return (*forwards[:ahead], *(step for pair in pairs for step in pair), *remaining)
