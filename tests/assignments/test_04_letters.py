"""Questions with a letter for an answer."""

from __future__ import annotations

from typing import Any

import pytest

from course_lib.checking import Case, Observed
from course_lib.checking.local import load_module
from course_lib.ranks import Trace
from tests.helpers.course_folders import RELEASED
from tests.helpers.findings import expect_said, said

checks = load_module(RELEASED / "04_pytorch_ddp" / "checks.py")

CHOICES = {"A": "a ring", "B": "a tree"}


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"first": "A", "second": "B"}, ""),
        ({"first": "A"}, "the answers are for first, expected one for each of first, second"),
        ({}, "the answers are for nothing, expected"),
        ({"first": "A", "second": "C"}, "second: 'C' is none of the letters A to B"),
    ],
)
def test_letters(answers: Any, words: str) -> None:
    judge = checks.are_letters(["first", "second"], CHOICES)
    expect_said(said(judge, Case("", 1), [None], [{"answers": answers}]), words)


@pytest.mark.parametrize(("letter", "words"), [("B", ""), ("A", "first: not A (a ring) | Count")])
def test_a_letter_is_right_or_not(letter: str, words: str) -> None:
    expects = checks.is_right("first", checks.digest("first", "B"), CHOICES, "Count the messages.")
    observed = Observed([{"value": {"answers": {"first": letter}}}])

    def judge(case: Case, *_: Any) -> None:
        expects.test(case, observed, Trace([], 1))

    expect_said(said(judge, Case("", 1), [], []), words)
    assert expects.part == "first"


def test_letters_come_in_a_dict() -> None:
    with pytest.raises(TypeError, match="expected a dict from question to letter"):
        checks.answers_program(lambda: ["A", "B"], None, None)  # type: ignore[arg-type]
