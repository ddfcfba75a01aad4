"""A line is compared with what is so, case by case, and the first wrong case is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from course_lib.checking import puzzle
from course_lib.sharding import shard_bounds

pytestmark = pytest.mark.every_case
CASES = [{"rank": rank, "K": 4} for rank in range(4)]


def bounds(rank: int, K: int) -> tuple[int, int]:
    return shard_bounds(10, K, rank)


def test_dots_are_not_an_answer() -> None:
    made = puzzle("Which rows?", lambda rank, K: ..., truth=bounds, cases=CASES)
    assert made.right is None and not made.solved
    assert "Not filled in yet" in repr(made)


def test_the_first_wrong_case_is_told_with_both_values() -> None:
    made = puzzle("Who?", lambda rank: rank - 1, truth=lambda rank: (rank - 1) % 3,
                  cases=[{"rank": 1}, {"rank": 0}, {"rank": 2}])  # fmt: skip
    assert (made.right, made.total) == (2, 3)
    assert "Right in 2 of 3 cases. With rank=0 your line gives -1; right is 2." in repr(made)


def test_an_error_in_the_line_is_told_and_counts_as_wrong() -> None:
    made = puzzle(
        "x?", lambda rank: 1 // rank, truth=lambda rank: 1, cases=[{"rank": 0}, {"rank": 1}]
    )
    assert made.right == 1
    assert "With rank=0 your line raises ZeroDivisionError" in repr(made)


def test_without_cases_nothing_is_right() -> None:
    with pytest.raises(ValueError, match="needs cases"):
        puzzle("x?", lambda: 1, truth=lambda: 1, cases=[])


@pytest.mark.parametrize(
    ("said", "so", "same"),
    [
        (0.1 + 0.2, 0.3, True),
        (torch.tensor([1.0, 2.0]), [1, 2], True),
        ([1, 2], torch.tensor([1, 2]), True),
        ([1, 2], torch.tensor([1, 3]), False),
        ({2, 1}, [1, 2], True),
        ([1, 2], [1, 2, 3], False),
        ("1", 1, False),
        (None, None, True),
        (float("nan"), 1.0, False),
    ],
)
def test_values_that_mean_the_same(said: Any, so: Any, same: bool) -> None:
    assert puzzle("x?", lambda: said, truth=lambda: so, cases=[{}]).solved is same
