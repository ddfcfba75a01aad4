"""One check of one submission: the cost of its failures, and the report for each reader.

A stand-in runs the cases here: it answers, or fails in every way that a real one may.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from autograder.errors import SandboxUnavailable
from autograder.examination.budget import OutOfTime, SubmissionError
from autograder.examination.case import OverMemory
from autograder.examination.submission import examine
from autograder.examination.verdict import for_the_student, notes_on
from autograder.sandbox.sandbox import MachineFailure
from course_lib.checking import Case, Check, CheckReport, Observed, Wrong
from course_lib.ranks.explain.errors import (
    DeadlockError,
    MismatchError,
    RankError,
    RanksError,
    RankTimeout,
)

pytestmark = pytest.mark.every_case
PUBLIC, HIDDEN = Case("public", 1), Case("hidden", 1)


def judge(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
    if values != inputs:
        raise Wrong(f"expected {inputs}, got {values}")


CHECK = Check("f", lambda f, value: f(value), lambda case, generator: [1.5], judge, (PUBLIC,))
WRONG = [0.0]


def run(answer: Any, only: Case | None = None, alive: Any = lambda: None, **changes: Any) -> Any:
    """Examine a submission with this answer, or this error, in all cases or only in one."""

    def runner(check: Check, case: Case, inputs: Sequence[Any]) -> Observed:
        if isinstance(answer, BaseException) and only in (None, case):
            raise answer
        return Observed(inputs if answer is None or only not in (None, case) else answer)

    submission: Any = SimpleNamespace(runner=lambda payload: runner, check_alive=alive)
    return examine("02/f", replace(CHECK, **changes), submission, seed="1", hidden=[HIDDEN])


def passed(report: CheckReport) -> list[bool]:
    return [result.passed for result in report.results]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (DeadlockError("Ranks 0 and 1 wait."), "The ranks wait for one another"),
        (MismatchError("3 and 4 elements."), "that do not fit together"),
        (RankTimeout("It took 9 s."), "The ranks took longer than their limit"),
        (RankError("Rank 0 raised 1.5.", rank=0), "A rank raised an exception"),
        (RanksError("1.5 is left."), "The ranks did not run to their end"),
        (OverMemory("1.5 GiB."), "The ranks took more memory than their limit"),
        (WRONG, "The result or the behaviour of the function is wrong in this case"),
        (OutOfTime("60 s are used up."), "60 s are used up."),  # of the submission alone: as it is
        (SubmissionError("f is not defined"), "f is not defined"),
    ],
)
def test_of_a_hidden_case_only_the_kind_of_failure_is_told(answer: Any, message: str) -> None:
    examined = run(answer, HIDDEN)
    assert passed(examined) == [True, False]
    shown = for_the_student(examined)
    assert message in shown.results[1].reason
    assert "1.5" not in f"{shown} {shown.results[1].reason} {shown.results[1].detail}"
    if answer is WRONG:
        assert "1.5" in examined.results[1].reason, "the instructor reads all of it"


def test_a_judge_that_breaks_costs_that_case_and_somebody_is_told() -> None:
    def breaks(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
        if case == PUBLIC:
            raise ZeroDivisionError("in the judge")

    examined = run(None, judge=breaks)
    assert passed(examined) == [False, True]
    assert "in the judge" in notes_on(examined)[0]


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (MachineFailure("it ended"), MachineFailure, "it ended"),
        (SandboxUnavailable("no bwrap"), SandboxUnavailable, "no bwrap"),
        (KeyError("an accident"), KeyError, "an accident"),
    ],
)
def test_nobody_is_graded_where_the_sandbox_or_the_grader_fails(error, kind, message):
    with pytest.raises(kind, match=message):
        run(error, PUBLIC)


def test_nobody_is_graded_where_a_failed_sandbox_was_overlooked() -> None:
    """A judge may swallow the loss of the sandbox."""

    def gone() -> None:
        raise MachineFailure("The sandbox has ended")

    with pytest.raises(MachineFailure):
        run(WRONG, alive=gone)
