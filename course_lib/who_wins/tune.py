"""Learning rates: each algorithm gets the best of a few, on seeds that the map does not use."""

import math
from collections.abc import Callable, Sequence

from course_lib.who_wins.algorithms import ALGORITHMS
from course_lib.who_wins.problem import Problem
from course_lib.who_wins.records import Records
from course_lib.who_wins.sweep import Job, Place, run, train_job
from course_lib.who_wins.winners import interval

SEEDS = (1000, 1001)
FACTORS = (0.5, 1.0, 1.5)
"""Times the learning rate that stands in `ALGORITHMS`."""
WITH_SERVER: Place = (1e-3, 1e6)
"""The network on which algorithms with a server are tried."""


def tune(
    names: Sequence[str],
    problem: Problem,
    records: Records,
    processes: int,
    say: Callable[[str], object],
) -> str:
    """Return a table: for each algorithm the steps to the target (or updates) by learning rate.

    The first row is the rate times 1/2, then as it is, then times 3/2.
    """
    jobs: dict[tuple[str, float], list[Job]] = {}
    for name in dict.fromkeys(ALGORITHMS[name].same_as or name for name in names):
        for factor in FACTORS:
            lr = round(factor * ALGORITHMS[name].lr, 6)
            if ALGORITHMS[name].prepare is None:
                tries = [Job("serve", name, lr, s, WITH_SERVER, problem) for s in SEEDS]
            else:
                tries = [train_job(name, seed, problem, lr) for seed in SEEDS]
            jobs[name, lr] = tries
    run([job for tries in jobs.values() for job in tries], records, processes, say)
    lines = ["| algorithm | learning rate | steps to the target |", "|---|---:|---:|"]
    for (name, lr), tries in jobs.items():
        values = [_steps(records[job.key]) for job in tries]
        mean = interval(values).mean
        said = "not reached by all" if math.isinf(mean) else f"{mean:.0f}"
        lines.append(f"| {name} | {lr:g} | {said} |")
    return "\n".join(lines)


def _steps(value: object) -> float:
    reached = value["updates"] if isinstance(value, dict) else value
    return math.inf if reached is None else float(reached)  # type: ignore[arg-type]
