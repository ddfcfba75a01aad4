"""Find the winner of each cell of the map over several seeds, and check whether it is clear.

The times of two algorithms with the same seed form a pair, because the first weights and the
batches are the same. So the winner is *clear* if, for every other algorithm, the mean of
log(other / first) over the seeds is above 0 with 95 % confidence (Student's t). It does not matter
whether two intervals overlap.
"""

import math
from collections.abc import Iterable, Sequence
from statistics import mean, stdev
from typing import NamedTuple

from course_lib.cost_model import (
    direct_all_reduce_time,
    one_shot_all_reduce_time,
    ring_all_reduce_time,
)
from course_lib.who_wins.algorithms import ALGORITHMS
from course_lib.who_wins.problem import Problem, gradient_bytes, network_of
from course_lib.who_wins.sweep import Place, Results, pace_job, serve_job, train_job

# The 97.5 % quantile of Student's t with 1, 2, … degrees of freedom; beyond, less than 0.1 off.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


class Interval(NamedTuple):
    """A mean and half the width of its 95 % interval; infinite if it is unknown."""

    mean: float
    half: float


class Cell(NamedTuple):
    """The results on one network.

    Attributes:
        place: the network's latency and bandwidth.
        seconds: for each algorithm, seconds to the target by seed; infinite if it was not reached.
        exact: for each algorithm, whether its steps repeat exactly on this network.

    """

    place: Place
    seconds: dict[str, list[float]]
    exact: dict[str, bool]

    def order(self) -> list[str]:
        """Return the algorithms, the fastest first."""
        return sorted(self.seconds, key=lambda name: mean(self.seconds[name]))

    def is_clear(self) -> bool:
        """Return whether the first is faster than all others with 95 % confidence.

        Algorithms that make the same updates in a different way, such as over a ring, do not count.
        """
        first, *slower = self.order()
        others = [name for name in slower if _updates_of(name) != _updates_of(first)]
        return all(_is_ahead(self.seconds[first], self.seconds[name]) for name in others)


def _updates_of(name: str) -> str:
    return ALGORITHMS[name].same_as or name


def _is_ahead(first: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether the seconds by seed are less than the other's, with 95 % confidence."""
    if any(map(math.isinf, first)):
        return False
    if any(map(math.isinf, other)):
        return True
    ahead = interval([math.log(b / a) for a, b in zip(first, other, strict=True)])
    return ahead.mean - ahead.half > 0


def interval(values: Sequence[float]) -> Interval:
    """Return the mean over seeds and half of its 95 % interval, which is infinite for one seed."""
    if any(math.isinf(value) for value in values):
        return Interval(math.inf, math.inf)
    if len(values) < 2:
        return Interval(values[0], math.inf)
    t = _T[len(values) - 2] if len(values) < len(_T) + 2 else 2.1
    return Interval(mean(values), t * stdev(values) / math.sqrt(len(values)))


def steps_of(
    names: Iterable[str], seeds: Sequence[int], problem: Problem, results: Results
) -> dict[str, list[float]]:
    """Return the steps to the target by seed (infinite: not reached), of those without a server."""
    steps = {}
    for name in names:
        if ALGORITHMS[name].prepare is not None:
            jobs = [train_job(name, seed, problem) for seed in seeds]
            steps[name] = [math.inf if results[job] is None else results[job] for job in jobs]
    return steps


def last_average(problem: Problem, place: Place) -> float:
    """Return the seconds of an all-reduce of the weights, by formula: the fastest of three.

    If the ranks' weights differ, no rank holds the mean that reached the target. So the ranks have
    to average once more at the end.
    """
    ways = (ring_all_reduce_time, direct_all_reduce_time, one_shot_all_reduce_time)
    network = network_of(*place)
    return min(way(gradient_bytes(), problem.workers, network) for way in ways)


def cells_of(
    names: Sequence[str],
    places: Iterable[Place],
    seeds: Sequence[int],
    problem: Problem,
    results: Results,
) -> list[Cell]:
    """Return the map: a cell for every place, with the results of `sweep.run`."""
    steps = steps_of(names, seeds, problem, results)
    cells = []
    for place in places:
        seconds: dict[str, list[float]] = {}
        exact = dict.fromkeys(names, True)
        for name in names:
            if name not in steps:
                served = [results[serve_job(name, seed, place, problem)] for seed in seeds]
                seconds[name] = [math.inf if s.seconds is None else s.seconds for s in served]
                continue
            pace = results[pace_job(name, place, problem)]
            exact[name] = pace.exact
            end = last_average(problem, place) if ALGORITHMS[name].differ else 0.0
            seconds[name] = [
                math.inf if math.isinf(count) else pace.after(int(count)) + end
                for count in steps[name]
            ]
        cells.append(Cell(place, seconds, exact))
    return cells
