"""The findings of a judge as text, for tables of mistakes and reports.

A mistake in such a table is a small change of the right answer, so that it breaks the rule it
stands beside and no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from course_lib.checking import Case, Wrong
from course_lib.checking.answers import Judge


def said(judge: Judge, case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> str:
    """Return what the judge finds, hint included; nothing if it is content."""
    try:
        judge(case, inputs, values)
    except Wrong as wrong:
        return f"{wrong.message} | {wrong.hint}"
    return ""


def expect_said(found: str, words: str) -> None:
    """Expect these words in what was found; no words: nothing was to be found."""
    if words:
        assert words in found
    else:
        assert found == ""
