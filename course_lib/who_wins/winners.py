"""Find the winner of each cell of the map over several seeds, and check whether it is clear.

The times of two algorithms with the same seed form a pair, because the first weights and the
batches are the same. So the winner is *clear* if, for every other algorithm, the mean of
log(other / first) over the seeds is above 0 with 95 % confidence (Student's t). It does not matter
whether two intervals overlap.
"""

import math
from collections.abc import Iterable, Sequence
from statistics import mean, stdev
from typing import Any, NamedTuple

from course_lib.cost_model import (
    direct_all_reduce_time,
    one_shot_all_reduce_time,
    ring_all_reduce_time,
)
from course_lib.who_wins.algorithms import ALGORITHMS
from course_lib.who_wins.measure import Pace, Served
from course_lib.who_wins.problem import Problem, gradient_bytes, network_of
from course_lib.who_wins.records import Records
from course_lib.who_wins.sweep import Place, pace_job, serve_job, train_job

# The 97.5 % quantile of Student's t with 1, 2, … degrees of freedom; beyond, less than 0.1 off.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)

COMPRESSED = ("8-bit", "1-bit", "top-k", "PowerSGD")


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
        pace: for each algorithm, seconds until each worker has computed one more gradient. This
            gives the time of an epoch, which does not depend on how much the loss falls.

    """

    place: Place
    seconds: dict[str, list[float]]
    exact: dict[str, bool]
    pace: dict[str, float]

    def order(self, names: Iterable[str] | None = None) -> list[str]:
        """Return the algorithms (only those in `names`, if given), the fastest first."""
        known = [n for n in self.seconds if names is None or n in names]
        return sorted(known, key=lambda name: mean(self.seconds[name]))

    def rivals(self, names: Iterable[str] | None = None) -> list[str]:
        """Return the algorithms, fastest first, that are not clearly slower than the first.

        The first is faster than all others with 95 % confidence. Algorithms that make the same
        updates in a different way, such as over a ring, are not rivals.
        """
        first, *others = self.order(names)
        same = _updates_of(first)
        return [
            each
            for each in others
            if _updates_of(each) != same and not _is_ahead(self.seconds[first], self.seconds[each])
        ]

    def is_clear(self, names: Iterable[str] | None = None) -> bool:
        """Return whether the fastest algorithm has no `rivals`."""
        return not self.rivals(names)


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


def steps_in(record: Any) -> float:
    """Return the steps or updates to the target in a record; infinite if it has none."""
    reached = record["updates"] if isinstance(record, dict) else record
    return math.inf if reached is None else float(reached)


def steps_of(
    names: Iterable[str], seeds: Sequence[int], problem: Problem, records: Records
) -> dict[str, list[float]]:
    """Return the steps to the target by seed, for algorithms without a server."""
    found = {}
    for name in names:
        if ALGORITHMS[name].prepare is not None:
            jobs = [train_job(name, seed, problem) for seed in seeds]
            found[name] = [steps_in(records[job.key]) for job in jobs]
    return found


def updates_of(
    names: Iterable[str],
    places: Iterable[Place],
    seeds: Sequence[int],
    problem: Problem,
    records: Records,
) -> dict[str, list[float]]:
    """Return the mean updates to the target by place, for algorithms with a server."""
    found = {}
    for name in names:
        if ALGORITHMS[name].prepare is None:
            found[name] = [
                mean(steps_in(records[serve_job(name, s, place, problem).key]) for s in seeds)
                for place in places
            ]
    return found


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
    records: Records,
) -> list[Cell]:
    """Return the map: a cell for every place, with the results of `sweep.run`."""
    steps = steps_of(names, seeds, problem, records)
    cells = []
    for place in places:
        seconds: dict[str, list[float]] = {}
        exact, paces = dict.fromkeys(names, True), {}
        for name in names:
            if name not in steps:
                jobs = [serve_job(name, seed, place, problem) for seed in seeds]
                served = [Served(**records[job.key]) for job in jobs]
                seconds[name] = [math.inf if s.seconds is None else s.seconds for s in served]
                paces[name] = problem.workers * mean(each.pace for each in served)
                continue
            pace = Pace(**records[pace_job(name, place, problem).key])
            exact[name], paces[name] = pace.exact, pace.seconds / pace.period
            end = last_average(problem, place) if ALGORITHMS[name].differ else 0.0
            seconds[name] = [
                math.inf if math.isinf(each) else pace.after(int(each)) + end
                for each in steps[name]
            ]
        cells.append(Cell(place, seconds, exact, paces))
    return cells


class Beside(NamedTuple):
    """Half of a published finding, and the cells that agree with it or do not."""

    says: str
    agree: list[Place]
    differ: dict[Place, str]


def beside_bagua(cells: Sequence[Cell], names: Iterable[str], by_epoch: bool) -> list[Beside]:
    """Compare the map with BAGUA's finding for low bandwidth and for high latency.

    S. Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", VLDB 2021, and
    https://tutorials.baguasys.com/benchmark/ (BERT-Large, 1 to 100 Gb/s, up to 5 ms): with low
    bandwidth the algorithms that send fewer bytes win, with high latency the decentralized ones.

    BAGUA reports the time of an epoch, which `by_epoch` selects; otherwise the time to the target
    is compared. The comparison uses the column of the lowest bandwidth and the row of the highest
    latency. It leaves out the corner that both share, because the page shows nothing about it.
    """
    least = min(cell.place[1] for cell in cells)
    most = max(cell.place[0] for cell in cells)
    low = [c for c in cells if c.place[1] == least and c.place[0] != most]
    high = [c for c in cells if c.place[0] == most and c.place[1] != least]
    known = list(names)

    def beside(says: str, some: Iterable[Cell], family: Sequence[str]) -> Beside:
        winners = {
            cell.place: min(known, key=lambda n: cell.pace[n]) if by_epoch else cell.order(known)[0]
            for cell in some
        }
        agree = [place for place, name in winners.items() if name in family]
        return Beside(says, agree, {p: n for p, n in winners.items() if n not in family})

    return [
        beside("low bandwidth: compression wins", low, COMPRESSED),
        beside("high latency: decentralized wins", high, ("decentralized",)),
    ]
