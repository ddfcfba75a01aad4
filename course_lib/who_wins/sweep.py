"""Make all runs that a map needs, in parallel processes; runs with a result are skipped.

There are three kinds of jobs. `train` trains an algorithm once per seed. `pace` times its steps
once per network. `serve` is a whole training per network, for algorithms whose weights depend on
the network (see `measure`).
"""

import math
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from typing import Any

import torch

from course_lib.who_wins.algorithms import ALGORITHMS, setting_of
from course_lib.who_wins.measure import time_steps, train, train_with_server
from course_lib.who_wins.problem import Problem, network_of
from course_lib.who_wins.records import Records
from course_lib.who_wins.settings import Setting

Place = tuple[float, float]
"""Latency in seconds and bandwidth in bytes per second: a cell of the map."""


@dataclass(frozen=True)
class Job:
    """One run. `seed` or `place` (the network) is None if the run does not depend on it."""

    kind: str
    algorithm: str
    setting: Setting
    seed: int | None
    place: Place | None
    problem: Problem

    @property
    def key(self) -> dict[str, Any]:
        """The key of a result: everything that it depends on."""
        place = None if self.place is None else list(self.place)
        return {**asdict(self), "setting": list(self.setting), "place": place}


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
    order = {"serve": 0, "train": 1, "pace": 2}
    return sorted(dict.fromkeys(jobs), key=lambda job: order[job.kind])


def train_job(name: str, seed: int, problem: Problem, setting: Setting | None = None) -> Job:
    """Return the job that trains; if `same_as` is set, the job of that algorithm."""
    name = ALGORITHMS[name].same_as or name
    return Job("train", name, setting or setting_of(name), seed, None, problem)


def pace_job(name: str, place: Place, problem: Problem) -> Job:
    """Return the job that times a few steps; their times do not depend on the numbers."""
    return Job("pace", name, setting_of(name), None, place, problem)


def serve_job(
    name: str, seed: int, place: Place, problem: Problem, setting: Setting | None = None
) -> Job:
    """Return the job that trains with a server.

    If `same_as` is set and there is no straggler, it is the job of that algorithm.
    """
    if problem.straggler == 1:
        name = ALGORITHMS[name].same_as or name
    return Job("serve", name, setting or setting_of(name), seed, place, problem)


def do(job: Job) -> Any:
    """Run a job; return its result as plain values for JSON."""
    if job.kind == "train":
        assert job.seed is not None
        return train(job.problem, job.algorithm, job.seed, job.setting)
    assert job.place is not None
    network = network_of(*job.place)
    if job.kind == "pace":
        return time_steps(job.problem, job.algorithm, network)._asdict()
    assert job.seed is not None
    served = train_with_server(job.problem, job.algorithm, job.seed, network, job.setting)
    return served._asdict()


def run(
    jobs: Sequence[Job], records: Records, processes: int, say: Callable[[str], object]
) -> None:
    """Run the jobs that have no result yet, and store each result at once.

    An interrupt ends the processes; unfinished jobs run again the next time.
    """
    left = [job for job in jobs if job.key not in records]
    if len(left) < len(jobs):
        say(f"{len(jobs) - len(left)} of {len(jobs)} runs are in {records.path} already\n")
    if processes == 1:
        progress = _Progress(left, 1, say)
        for job in left:
            start = time.monotonic()
            records.add(job.key, do(job))
            progress.done(job, time.monotonic() - start)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_begin) as pool:
        progress = _Progress(left, processes, say)
        waiting: dict[Future[tuple[Any, float]], Job] = {}
        try:
            waiting = {pool.submit(_timed, job): job for job in left}
            while waiting:
                ended, _ = wait(waiting, return_when=FIRST_COMPLETED)
                for future in ended:
                    job = waiting.pop(future)
                    value, seconds = future.result()
                    records.add(job.key, value)
                    progress.done(job, seconds)
        except BaseException:
            for process in list((pool._processes or {}).values()):
                process.terminate()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _begin() -> None:
    """Prepare a new process: ignore interrupts, because the parent handles them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def _timed(job: Job) -> tuple[Any, float]:
    start = time.monotonic()
    return do(job), time.monotonic() - start


class _Progress:
    """Show how many runs are done, and estimate the time left from similar runs."""

    def __init__(self, jobs: Sequence[Job], processes: int, say: Callable[[str], object]) -> None:
        self._left = list(jobs)
        self._total, self._processes, self._say = len(jobs), processes, say
        self._took: dict[tuple[str, str], list[float]] = {}

    def done(self, job: Job, seconds: float) -> None:
        self._left.remove(job)
        self._took.setdefault((job.kind, job.algorithm), []).append(seconds)
        everything = [each for took in self._took.values() for each in took]
        mean = math.fsum(everything) / len(everything)
        rest = 0.0
        for each in self._left:
            took = self._took.get((each.kind, each.algorithm))
            rest += math.fsum(took) / len(took) if took else mean
        minutes, seconds = divmod(round(rest / self._processes), 60)
        text = f"{self._total - len(self._left)} of {self._total} runs"
        if self._left:
            text += f", about {minutes} min {seconds:02} s left"
        self._say(f"\r{text:60}" + ("" if self._left else "\n"))
