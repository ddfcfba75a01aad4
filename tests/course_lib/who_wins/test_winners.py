"""The winner of a cell, and whether it is clear."""

import math

import pytest

from course_lib.who_wins.winners import Cell, interval


def cell(seconds: dict[str, list[float]]) -> Cell:
    return Cell((1, 1), seconds, dict.fromkeys(seconds, True))


def test_an_interval_is_students() -> None:
    assert interval([1.0, 3.0]).mean == 2.0
    assert interval([1.0, 3.0]).half == pytest.approx(12.706)  # t · √2 / √2
    assert interval([1.0, 2.0, 3.0]).half == pytest.approx(4.303 / math.sqrt(3))
    assert math.isinf(interval([1.0]).half)
    assert math.isinf(interval([1.0, math.inf]).mean)


def test_the_winner_has_the_least_mean_and_pairs_say_whether_it_is_clear() -> None:
    wide = cell({"flat": [1.0, 10.0, 100.0], "1-bit": [1.1, 11.2, 110.0]})
    assert wide.order() == ["flat", "1-bit"]
    assert wide.is_clear()  # by 10 % in every seed, however much seeds differ
    unclear = cell({"flat": [1.0, 2.0, 3.0], "1-bit": [2.0, 1.0, 3.1]})
    assert not unclear.is_clear()


def test_the_same_updates_over_a_ring_are_no_rival() -> None:
    over_a_ring = cell({"flat": [1.0, 2.0], "decentralized": [2.0, 4.0], "flat, ring": [1.0, 2.1]})
    assert over_a_ring.order()[:2] == ["flat", "flat, ring"]
    assert over_a_ring.is_clear()


def test_who_does_not_reach_the_target_does_not_win() -> None:
    failed = cell({"flat": [1.0, math.inf], "1-bit": [5.0, 6.0]})
    assert failed.order() == ["1-bit", "flat"]
    assert failed.is_clear()
    nobody = cell({"flat": [math.inf, 1.0], "1-bit": [math.inf, math.inf]})
    assert not nobody.is_clear()
