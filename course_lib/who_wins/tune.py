"""Tuning: every algorithm gets the same tries, on seeds that the map does not use."""

from collections.abc import Callable, Sequence

from course_lib.who_wins.algorithms import ALGORITHMS
from course_lib.who_wins.problem import Problem
from course_lib.who_wins.rates import GRID, Tried, best
from course_lib.who_wins.records import Records
from course_lib.who_wins.report import bandwidth_words, latency_words
from course_lib.who_wins.sweep import Job, Place, run, serve_job, train_job
from course_lib.who_wins.winners import interval, steps_in

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
    """Try each learning rate of the grid with each algorithm, and return the results.

    Algorithms with the same weights (`same_as`) are tried once.
    """
    jobs: dict[str, dict[float, list[Job]]] = {}
    for name in dict.fromkeys(ALGORITHMS[name].same_as or name for name in names):
        if ALGORITHMS[name].prepare is None:
            jobs[name] = {
                lr: [serve_job(name, seed, WITH_SERVER, problem, lr) for seed in SEEDS]
                for lr in GRID
            }
        else:
            jobs[name] = {lr: [train_job(name, seed, problem, lr) for seed in SEEDS] for lr in GRID}
    everything = [job for rates in jobs.values() for tries in rates.values() for job in tries]
    run(everything, records, processes, say)
    return {
        name: {
            lr: interval([steps_in(records[job.key]) for job in tries]).mean
            for lr, tries in rates.items()
        }
        for name, rates in jobs.items()
    }


def conditions(problem: Problem) -> str:
    """Return the conditions of the tries in a few lines."""
    latency, bandwidth = latency_words(WITH_SERVER[0]), bandwidth_words(WITH_SERVER[1])
    return (
        f"{problem.workers} workers, {problem.rows} rows each, target {problem.target:g}, at most "
        f"{problem.steps} steps; seeds {', '.join(map(str, SEEDS))}\n"
        "mean steps to the target, empty where a seed did not reach it; with a server updates, at "
        f"{latency} and {bandwidth}"
    )


def tuned_table(tried: Tried) -> str:
    """Return the tries as a table in Markdown: a row per algorithm, its best in bold."""
    rates = list(next(iter(tried.values())))
    lines = [
        f"| algorithm | {' | '.join(f'{lr:g}' for lr in rates)} |",
        "|---|" + "---:|" * len(rates),
    ]
    for name, tries in tried.items():
        reached = [lr for lr in rates if tries[lr] < float("inf")]
        first = best(tries) if reached else None
        values = [f"{tries[lr]:.0f}" if lr in reached else "" for lr in rates]
        values = [f"**{v}**" if lr == first else v for lr, v in zip(rates, values, strict=True)]
        lines.append(f"| {name} | {' | '.join(values)} |")
    return "\n".join(lines)
