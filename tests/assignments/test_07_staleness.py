"""The reports on a wrong staleness."""

from __future__ import annotations

from typing import Any

import pytest

from course_lib.checking import Case
from course_lib.checking.local import load_module
from tests.helpers.course_folders import RELEASED
from tests.helpers.findings import expect_said, said

judges = load_module(RELEASED / "07_asynchronous_training" / "judges.py")

# Worker 2 pulls later than right after its push; and who pulls when is not who pushes when.
AGES = judges.script("1 2 +2 +1 1 2 +1 1 +2 +1")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([0, 1, 0, 1, 1], ""),
        (
            [0, 0, 0, 1, 1],
            "push number 1 (counted from 0), by worker 1: expected staleness 1, got 0",
        ),
        ([1, 2, 1, 2, 2], "This equals the right list plus 1"),
        ([0, 0, 2, 2, 3], "This equals the versions that were pulled"),
        ([0, 1, 0, 2, 1], "This equals the right list if each worker pulls right after its push"),
        ([0, 1, 0], "the list has 3 numbers, expected 5, one for each push"),
        ((0, 1, 0, 1, 1), "expected a list of 5 ints"),
        ([0, 1.0, 0, 1, 1], "expected a list of 5 ints"),
    ],
)
def test_staleness(answer: Any, words: str) -> None:
    expect_said(said(judges.judge_ages, Case("", 1, {"events": AGES}), [None], [answer]), words)
