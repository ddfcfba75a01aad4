"""What is said of a wrong staleness."""

from __future__ import annotations

from typing import Any

import pytest

from course_lib.checking import Case
from course_lib.checking.asynchrony import judge_ages, script
from tests.helpers.findings import expect_said, said

# Worker 1 pulls, worker 2 pulls late; 1 pulls again later than right after its push.
AGES = script("1 2 +1 +2 1 +1 2 1 +2 +1")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([0, 1, 0, 0, 1], ""),
        ([0, 1, 0, 1, 1], "push 3, of worker 2: expected staleness 0, got 1"),
        ([1, 2, 1, 1, 2], "This equals the right list plus 1"),
        ([0, 0, 2, 3, 3], "This equals the version that was pulled"),
        ([0, 1, 1, 1, 1], "This equals what it is if each worker pulls right after its push"),
        ([0, 1, 0], "the list has 3 numbers, expected 5, one for each push"),
        ((0, 1, 0, 0, 1), "expected a list of 5 ints"),
        ([0, 1.0, 0, 0, 1], "expected a list of 5 ints"),
    ],
)
def test_staleness(answer: Any, words: str) -> None:
    expect_said(said(judge_ages, Case("", 1, {"events": AGES}), [None], [answer]), words)
