"""Checks for schedules that cannot work: missing steps, a deadlock.

    >>> from course_lib.pipeline_parallel import Schedule, Step, check_schedule
    >>> backward_first = (Step("B", 0), Step("F", 0))
    >>> check_schedule(Schedule("mine", 1, (backward_first,)))  # doctest: +NORMALIZE_WHITESPACE
    Traceback (most recent call last):
    course_lib.pipeline_parallel.validity.ScheduleError: mine: a deadlock. Rank 0 cannot begin B0
    before F0 of rank 0 is over, but F0 comes later in its schedule

As a schedule is data, all of this can be checked before anything runs.
"""

from collections import Counter

from course_lib.pipeline_parallel.schedule import Schedule, Step, Work
from course_lib.pipeline_parallel.simulation import simulate


class ScheduleError(ValueError):
    """A schedule cannot be executed."""


def check_schedule(schedule: Schedule) -> None:
    """Check that every rank can do its steps.

    Raises ScheduleError if a step is missing, occurs twice or does not belong to this pipeline, or
    if ranks wait for one another for ever.
    """
    _check_steps(schedule)
    _check_progress(schedule)


def _check_steps(schedule: Schedule) -> None:
    actions = ("F", "I", "W") if schedule.splits_backward else ("F", "B")
    expected = {
        (action, micro_batch, chunk)
        for action in actions
        for micro_batch in range(schedule.micro_batches)
        for chunk in range(schedule.chunks)
    }
    for rank, steps in enumerate(schedule.steps):
        counts = Counter(steps)
        mistakes = {
            "lacks": [f"{a}{m} of chunk {c}" for a, m, c in sorted(expected - counts.keys())],
            "repeats": [str(step) for step, count in counts.items() if count > 1],
            "has the unknown steps": [str(step) for step in counts if step not in expected],
        }
        for verb, names in mistakes.items():
            if names:
                raise ScheduleError(
                    f"{schedule.name}: rank {rank} {verb} {', '.join(names)}. Every rank must do "
                    f"{', '.join(actions)} once for each micro-batch ({schedule.micro_batches}) "
                    f"and each chunk ({schedule.chunks})"
                )


def _check_progress(schedule: Schedule) -> None:
    stuck = simulate(schedule).stuck
    if not stuck:
        return
    # Go from a waiting rank to the rank that it waits for, until a rank occurs again: a circle.
    rank, visited, waits = min(stuck), set[int](), []
    while rank not in visited:
        visited.add(rank)
        blocker = _first_missing(schedule, schedule.work(rank, stuck[rank]), stuck)
        holder = schedule.rank_of(blocker.stage)
        step = schedule.step(blocker)
        later = f", but {step} comes later in its schedule" if holder == rank else ""
        waits.append(
            f"Rank {rank} cannot begin {stuck[rank]} before {step} of rank {holder} is over{later}"
        )
        rank = holder
    raise ScheduleError(f"{schedule.name}: a deadlock. {'. '.join(waits)}")


def _first_missing(schedule: Schedule, work: Work, stuck: dict[int, Step]) -> Work:
    """Return the work that `work` waits for and that its rank has not done.

    This work is at or after the step at which its rank is stuck.
    """
    for needed in schedule.needs(work):
        steps = schedule.steps[schedule.rank_of(needed.stage)]
        stuck_at = stuck.get(schedule.rank_of(needed.stage))
        if stuck_at is not None and steps.index(schedule.step(needed)) >= steps.index(stuck_at):
            return needed
    raise AssertionError(f"{work} is stuck, and all that it needs is done")
