"""The reports on buckets: one mistake of each kind, beside the right ones."""

from __future__ import annotations

from typing import Any

import pytest

from course_lib.checking import Case
from course_lib.checking.local import load_module
from tests.helpers.course_folders import RELEASED
from tests.helpers.findings import expect_said, said

checks = load_module(RELEASED / "05_bucketing_and_overlap" / "checks.py")

# Five parameters of 4, 4, 2, 4 and 4 numbers: 2 is frozen, and 4 is the same tensor as 0.
ONCE = checks.asked(64, 64, 4, 4, 2, 4, 4, frozen=[2], same=[(0, 4)])


@pytest.mark.parametrize(
    ("buckets", "words"),
    [
        ([[3, 1], [0]], ""),
        ([[3, 1], [0, 5]], "expected only indices from 0 to 4"),
        ([[3, 1], [-1]], "expected only indices from 0 to 4"),
        ([[3, 2, 1], [0]], "parameter 2 is frozen"),
        ([[3, 1], [1, 0]], "parameter 1 is in the buckets twice"),
        ([[4, 3, 1]], "parameters 0 and 4 are the same tensor: expected only 0"),
        ([[3], [0]], "no bucket has parameter 1"),
    ],
)
def test_each_parameter_is_in_one_bucket(buckets: Any, words: str) -> None:
    expect_said(said(checks.every_parameter_once, Case("", 1, ONCE), [None], [buckets]), words)


# 16 B a parameter of float32; the first bucket of a dtype holds one, the others two.
CUT = checks.asked(32, 16, 4, 4, 4, 4)
MIXED = checks.asked(32, 32, 4, 4, 4, 4, dtypes=["float32", "bfloat16", "float32", "bfloat16"])


@pytest.mark.parametrize(
    ("parameters", "buckets", "words"),
    [
        (CUT, [[3], [2, 1], [0]], ""),
        (MIXED, [[3, 1], [2, 0]], ""),
        (MIXED, [[3, 2], [1, 0]], "has 2 dtypes, expected one"),
        (CUT, [[3], [1, 2], [0]], "is not in reverse order"),
        (CUT, [[3, 2], [1, 0]], "has 32 B, but the first cap of each dtype is min("),
        (CUT, [[3], [2, 1, 0]], "has 48 B, but the cap is 32 B"),
        (CUT, [[2], [3, 1], [0]], "stands before [3, 1] but becomes complete after it"),
        (CUT, [[3], [2], [1, 0]], "bucket [2] of [[3], [2], [1, 0]] still has room for"),
        (MIXED, [[2, 0], [3, 1]], "are not in the order in which they become complete"),
    ],
)
def test_buckets_are_cut_well(parameters: Any, buckets: Any, words: str) -> None:
    expect_said(said(checks.well_cut, Case("", 1, parameters), [None], [buckets]), words)
