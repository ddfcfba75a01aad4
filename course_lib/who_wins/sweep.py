"""Make all runs that a map needs, in parallel processes.

There are three kinds of jobs. `train_job` trains an algorithm once per seed. `pace_job` times its
steps once per network. `serve_job` is a whole training per network, for algorithms whose weights
depend on the network (see `measure`).
"""

import multiprocessing
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import torch

from course_lib.who_wins.algorithms import ALGORITHMS
from course_lib.who_wins.measure import time_steps, train, train_with_server
from course_lib.who_wins.problem import Problem, network_of

Place = tuple[float, float]
"""Latency in seconds and bandwidth in bytes per second: a cell of the map."""


Job = tuple[Any, ...]
"""One run: a function of `measure`, and its arguments."""
Results = Mapping[Job, Any]
"""The results of all jobs of a map."""


def train_job(name: str, seed: int, problem: Problem) -> Job:
    """Return the job that trains; if `same_as` is set, the job of that algorithm."""
    return train, problem, ALGORITHMS[name].same_as or name, seed


def pace_job(name: str, place: Place, problem: Problem) -> Job:
    """Return the job that times a few steps; their times do not depend on the numbers."""
    return time_steps, problem, name, network_of(*place)


def serve_job(name: str, seed: int, place: Place, problem: Problem) -> Job:
    """Return the job that trains with a server.

    If `same_as` is set and there is no straggler, it is the job of that algorithm.
    """
    if problem.straggler == 1:
        name = ALGORITHMS[name].same_as or name
    return train_with_server, problem, name, seed, network_of(*place)


def jobs_of(
    names: Iterable[str], places: Sequence[Place], seeds: Sequence[int], problem: Problem
) -> list[Job]:
    """Return the jobs of a map, each once, the longest ones first."""
    jobs = []
    for name in names:
        if ALGORITHMS[name].prepare is None:
            jobs += [serve_job(name, s, place, problem) for place in places for s in seeds]
            continue
        jobs += [pace_job(name, place, problem) for place in places]
        jobs += [train_job(name, seed, problem) for seed in seeds]
    order = (train_with_server, train, time_steps)
    return sorted(dict.fromkeys(jobs), key=lambda job: order.index(job[0]))


def run(
    jobs: Sequence[Job], processes: int, show_progress: Callable[[int, int], object]
) -> dict[Job, Any]:
    """Run all jobs and return their results; `show_progress` gets how many of them are done."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _begin) as pool:
        running = {job: pool.submit(*job) for job in jobs}
        try:
            for number, future in enumerate(as_completed(running.values()), 1):
                future.result()
                show_progress(number, len(jobs))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return {job: future.result() for job, future in running.items()}


def _begin() -> None:
    """Prepare a process: one thread, and an interrupt ends it without a word."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)
