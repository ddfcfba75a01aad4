"""The winner of a cell, whether it is clear, and where the map differs from published results."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from course_lib.ranks import Ranks
from course_lib.who_wins.problem import Problem, gradient_bytes, network_of
from course_lib.who_wins.winners import Cell, beside_bagua, interval, last_average

NAMES = ("flat", "1-bit", "decentralized")


def cell(latency: float, bandwidth: float, **seconds: list[float]) -> Cell:
    by_name = {name.replace("_", "-"): values for name, values in seconds.items()}
    by_name = {{"one-bit": "1-bit"}.get(name, name): each for name, each in by_name.items()}
    pace = {name: 10 / sum(values) for name, values in by_name.items()}  # the other way round
    return Cell((latency, bandwidth), by_name, dict.fromkeys(by_name, True), pace)


def test_an_interval_is_students() -> None:
    assert interval([1.0, 3.0]).mean == 2.0
    assert interval([1.0, 3.0]).half == pytest.approx(12.706)  # t · √2 / √2
    assert interval([1.0, 2.0, 3.0]).half == pytest.approx(4.303 / math.sqrt(3))
    assert math.isinf(interval([1.0]).half)
    assert math.isinf(interval([1.0, math.inf]).mean)


def test_the_winner_has_the_least_mean_and_pairs_say_whether_it_is_clear() -> None:
    wide = cell(1, 1, flat=[1.0, 10.0, 100.0], one_bit=[1.1, 11.2, 110.0])
    assert wide.order() == ["flat", "1-bit"]
    assert wide.is_clear()  # by 10 % in every seed, however much seeds differ
    unclear = cell(1, 1, flat=[1.0, 2.0, 3.0], one_bit=[2.0, 1.0, 3.1])
    assert not unclear.is_clear()


def test_a_winner_is_clear_only_if_it_is_ahead_of_all_others() -> None:
    """Not the second, but the third may be as fast: its times vary more."""
    made = cell(1, 1, flat=[1.0, 2.0, 3.0], one_bit=[1.1, 2.2, 3.3], decentralized=[0.5, 4.5, 3.0])
    assert made.order() == ["flat", "1-bit", "decentralized"]
    assert made.rivals() == ["decentralized"] and not made.is_clear()
    assert made.is_clear(["flat", "1-bit"])


def test_the_same_updates_over_a_ring_are_no_rival() -> None:
    made = cell(1, 1, flat=[1.0, 2.0], decentralized=[2.0, 4.0])
    made.seconds["flat, ring"] = [1.0, 2.1]
    assert made.order()[:2] == ["flat", "flat, ring"]
    assert made.is_clear()


def test_who_does_not_reach_the_target_does_not_win() -> None:
    failed = cell(1, 1, flat=[1.0, math.inf], one_bit=[5.0, 6.0])
    assert failed.order() == ["1-bit", "flat"]
    assert failed.is_clear()
    assert failed.order(["flat"]) == ["flat"]
    nobody = cell(1, 1, flat=[math.inf, 1.0], one_bit=[math.inf, math.inf])
    assert not nobody.is_clear()


def test_the_published_finding_is_held_against_edges_without_their_corner() -> None:
    fast = {"flat": [3.0, 3.0], "one_bit": [1.0, 1.0], "decentralized": [2.0, 2.0]}
    late = {"flat": [1.0, 1.0], "one_bit": [2.0, 2.0], "decentralized": [3.0, 3.0]}
    cells = [cell(1, 10, **fast), cell(1, 90, **late), cell(5, 10, **late), cell(5, 90, **late)]
    low, high = beside_bagua(cells, NAMES, by_epoch=False)
    assert low.agree == [(1, 10)] and not low.differ
    assert high.differ == {(5, 90): "flat"} and not high.agree
    low, high = beside_bagua(cells, NAMES, by_epoch=True)
    assert low.differ == {(1, 10): "flat"}
    assert high.agree == [(5, 90)]


@pytest.mark.parametrize("place", [(1e-3, 1e5), (20e-6, 1e7)])
def test_the_last_average_takes_as_long_as_executed(place: tuple[float, float]) -> None:
    network = replace(network_of(*place), all_reduce="direct")
    ranks = Ranks(4, on="simulated", network=network)
    ranks.run(lambda: dist.all_reduce(torch.ones(gradient_bytes() // 4)))
    assert last_average(Problem(), place) == pytest.approx(ranks.trace.makespan, rel=0.01)
