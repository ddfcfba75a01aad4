"""The winner of a cell, and whether it is clear."""

import math

import pytest

from course_lib.who_wins.winners import Cell, interval

RING = {"flat": [1.0, 2.0], "decentralized": [2.0, 4.0], "flat, ring": [1.0, 2.1]}


def test_an_interval_is_students() -> None:
    assert interval([1.0, 3.0]).mean == 2.0
    assert interval([1.0, 3.0]).half == pytest.approx(12.706)  # t · √2 / √2
    assert interval([1.0, 2.0, 3.0]).half == pytest.approx(4.303 / math.sqrt(3))
    assert math.isinf(interval([1.0]).half)
    assert math.isinf(interval([1.0, math.inf]).mean)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("seconds", "order", "clear"),
    [
        # By 10 % in every seed, however much seeds differ.
        ({"flat": [1.0, 10.0, 100.0], "1-bit": [1.1, 11.2, 110.0]}, ["flat", "1-bit"], True),
        ({"flat": [1.0, 2.0, 3.0], "1-bit": [2.0, 1.0, 3.1]}, ["flat", "1-bit"], False),
        # The same updates over a ring are no rival.
        (RING, ["flat", "flat, ring"], True),
        # Who does not reach the target does not win.
        ({"flat": [1.0, math.inf], "1-bit": [5.0, 6.0]}, ["1-bit", "flat"], True),
        ({"flat": [math.inf, 1.0], "1-bit": [math.inf, math.inf]}, [], False),
    ],
)
def test_the_winner_has_the_least_mean_and_pairs_say_whether_it_is_clear(seconds, order, clear):
    cell = Cell((1, 1), seconds, dict.fromkeys(seconds, True))
    assert cell.order()[: len(order)] == order
    assert cell.is_clear() == clear
