"""The reports on a wrong schedule of a pipeline, as data."""

from __future__ import annotations

from typing import Any

import pytest

from course_lib.checking import Case
from course_lib.checking.local import load_module
from tests.helpers.course_folders import RELEASED
from tests.helpers.findings import expect_said, said

judges = load_module(RELEASED / "09_sharding_the_model" / "judges.py")

F0, F1, F2, B0, B1, B2 = ([a, m] for a in "FB" for m in range(3))
RIGHT = [[F0, F1, B0, B1], [F0, B0, F1, B1]]


@pytest.mark.parametrize("p", [1, 2, 3, 8])
@pytest.mark.parametrize("bubble", [0.5, 0.34, 0.1])
def test_no_fewer_micro_batches_keep_the_bubble(p: int, bubble: float) -> None:
    m = judges.fewest(p, bubble)
    assert (p - 1) / (m + p - 1) <= bubble
    assert m == 1 or (p - 1) / (m - 1 + p - 1) > bubble


@pytest.mark.parametrize(
    ("schedules", "words"),
    [
        ([RIGHT, RIGHT], ""),
        (["int 3", "int 3"], "rank 0: the schedule is int 3, expected a list that"),
        ([RIGHT[:1], RIGHT[:1]], "rank 0: the schedule has steps for 1 rank, expected 2"),
        ([RIGHT, RIGHT[::-1]], "rank 1 returns a different schedule than rank 0"),
        (
            [[[F0, B0], [F0, B0]]] * 2,
            "rank 0 has 1 micro-batch, expected 2 | With m = 1 a rank waits 1/2",
        ),
        ([[RIGHT[0], [F0, B0, F1, B1, F2, B2]]] * 2, "rank 1 has 3 micro-batches, expected 2"),
        (
            [[[], RIGHT[1]]] * 2,
            "rank 0 has 0 micro-batches, expected 2 | With m = 0 a rank waits 1/1",
        ),
        ([[[F0, F0, B0, B1], RIGHT[1]]] * 2, 'rank 0 has the step ("F", 0) 2 times, expected once'),
        ([[RIGHT[0], [F0, F1, B1]]] * 2, 'rank 1 has the step ("B", 0) 0 times, expected once'),
        ([[RIGHT[0], [F0, F1, B0, B1, B2]]] * 2, 'rank 1 has the step ("B", 2), but the last'),
        ([[RIGHT[0], [F0, B1, F1, B0]]] * 2, "the backward of micro-batch 1 before its forward"),
    ],
)
def test_a_schedule(schedules: Any, words: str) -> None:
    case = Case("", 2, {"bubble": 0.34})  # at most a third of the time: two micro-batches
    values = [{"schedule": each} for each in schedules]
    expect_said(said(judges.whole_schedule, case, [None] * 2, values), words)


def test_one_rank_without_a_micro_batch_never_waits() -> None:
    found = said(judges.whole_schedule, Case("", 1, {"bubble": 0.5}), [None], [{"schedule": [[]]}])
    expect_said(found, "rank 0 has 0 micro-batches, expected 1 | With m = 0 a rank never waits")
