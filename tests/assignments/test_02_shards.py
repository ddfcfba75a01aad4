"""The reports on wrong bounds of shards."""

from __future__ import annotations

from typing import Any

import pytest

from course_lib.checking import Case
from course_lib.checking.local import load_module
from tests.helpers.course_folders import RELEASED
from tests.helpers.findings import expect_said, said

balanced_shards = load_module(RELEASED / "02_data_parallel_sgd" / "checks.py").balanced_shards


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ([(0, 4), (4, 7), (7, 10)], ""),
        ([(1, 4), (4, 7), (7, 10)], "rank 0 starts at 1, expected 0 | Element 0 is skipped"),
        ([(0, 4), (5, 7), (7, 10)], "rank 1 starts at 5, but rank 0 stopped at 4 | Element 4 is"),
        ([(0, 4), (3, 7), (7, 10)], "but rank 0 stopped at 4 | Element 3 is held twice"),
        ([(0, 3), (4, 6), (7, 9)], "but rank 0 stopped at 3 | A stop is not part of its shard"),
        ([(0, 4), (4, 3), (3, 10)], "rank 1 stops at 3, before its start 4"),
        ([(0, 4), (4, 7), (7, 11)], "the last rank stops at 11, beyond the end"),
        ([(0, 3), (3, 6), (6, 9)], "1 of 10 elements belong to nobody | What does the integer"),
        ([(0, 5), (5, 8), (8, 10)], "the shards have sizes [5, 3, 2]"),
        ([(0, 3), (3, 6), (6, 10)], "the shards have sizes [3, 3, 4]"),
    ],
)
def test_bounds(bounds: Any, words: str) -> None:
    inputs = [{"questions": [(10, 3)]}]
    values = [{"shard_bounds(10, 3, {})": bounds}]
    expect_said(said(balanced_shards, Case("", 1), inputs, values), words)


def test_one_rank_whose_stop_is_its_last_element() -> None:
    inputs, values = [{"questions": [(4, 1)]}], [{"shard_bounds(4, 1, {})": [(0, 3)]}]
    found = said(balanced_shards, Case("", 1), inputs, values)
    expect_said(found, "1 of 4 elements belong to nobody | A stop is not part of its shard")
