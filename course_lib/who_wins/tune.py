"""Tuning: the same settings are tried for every algorithm, on seeds that the map does not use."""

import math
from collections.abc import Callable, Sequence
from statistics import mean

from course_lib.who_wins.algorithms import ALGORITHMS
from course_lib.who_wins.problem import Problem
from course_lib.who_wins.records import Records
from course_lib.who_wins.report import bandwidth_words, latency_words
from course_lib.who_wins.settings import GRID, OPTIMIZERS, Setting, Tried, best
from course_lib.who_wins.sweep import Job, Place, run, serve_job, train_job
from course_lib.who_wins.winners import steps_in

SEEDS = (1000, 1001, 1002)
WITH_SERVER: Place = (5e-3, 1e6)
"""The network on which algorithms with a server are tried: the middle of the map."""


def tune(
    names: Sequence[str],
    problem: Problem,
    records: Records,
    processes: int,
    say: Callable[[str], object],
) -> Tried:
    """Try each optimizer with each learning rate on each algorithm, and return the results.

    Algorithms with the same weights (`same_as`) are tried once. If one seed did not reach the
    target with a setting, the setting is not tried with the next seed, because it has lost already.
    """
    every = [Setting(optimizer, lr) for optimizer in OPTIMIZERS for lr in GRID]
    trained = dict.fromkeys(ALGORITHMS[name].same_as or name for name in names)
    found: dict[str, dict[Setting, list[float]]] = {
        name: {s: [] for s in every} for name in trained
    }
    for seed in SEEDS:
        jobs: dict[Job, list[float]] = {
            _job(name, seed, problem, setting): steps
            for name, tries in found.items()
            for setting, steps in tries.items()
            if math.inf not in steps
        }
        run(list(jobs), records, processes, say)
        for job, steps in jobs.items():
            steps.append(steps_in(records[job.key]))
    return {name: {s: mean(steps) for s, steps in tries.items()} for name, tries in found.items()}


def _job(name: str, seed: int, problem: Problem, setting: Setting) -> Job:
    if ALGORITHMS[name].prepare is None:
        return serve_job(name, seed, WITH_SERVER, problem, setting)
    return train_job(name, seed, problem, setting)


def conditions(problem: Problem) -> str:
    """Return the conditions of the tries in a few lines."""
    latency, bandwidth = latency_words(WITH_SERVER[0]), bandwidth_words(WITH_SERVER[1])
    return (
        f"{problem.workers} workers, {problem.rows} rows each, target {problem.target:g}, at most "
        f"{problem.steps} steps; seeds {', '.join(map(str, SEEDS))}\n"
        f"mean steps to the target (updates if there is a server, at {latency} and {bandwidth}); "
        "empty if a seed did not reach the target"
    )


def tuned_table(tried: Tried) -> str:
    """Return the tries as a table in Markdown; the best of an algorithm in bold."""
    rates = sorted({setting.lr for tries in tried.values() for setting in tries})
    lines = [
        f"| algorithm | optimizer | {' | '.join(f'{lr:g}' for lr in rates)} |",
        "|---|---|" + "---:|" * len(rates),
    ]
    for name, tries in tried.items():
        reached = any(not math.isinf(steps) for steps in tries.values())
        first = best(tries) if reached else None
        for optimizer in dict.fromkeys(setting.optimizer for setting in tries):
            row = []
            for setting in (Setting(optimizer, lr) for lr in rates):
                value = "" if math.isinf(tries[setting]) else f"{tries[setting]:.0f}"
                row.append(f"**{value}**" if setting == first else value)
            lines.append(f"| {name} | {optimizer} | {' | '.join(row)} |")
    return "\n".join(lines)
