"""One check of one submission: the cost of its failures, and the report for each reader.

A stand-in runs the cases here: it answers, or fails in every way that a real one may.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from autograder.errors import SandboxUnavailable
from autograder.examination.budget import OutOfTime, SubmissionError
from autograder.examination.case import OverMemory
from autograder.examination.submission import MEMORY, TIME, examine
from autograder.examination.verdict import for_the_student, limits_of, notes_on
from autograder.sandbox.sandbox import MachineFailure
from course_lib.checking import Case, Check, CheckReport, Observed, Wrong
from course_lib.checking.cases import AuthorError
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

Answer = Callable[[Case, Sequence[Any]], Any]


class Ran:
    """A submission that answers so in every case."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def runner(self, taken: Any = None) -> Any:
        return lambda check, case, inputs: Observed(self._answer(case, inputs))

    def check_alive(self) -> None:
        """The sandbox has not failed."""


def right(case: Case, inputs: Sequence[Any]) -> Any:
    return inputs


def wrong(case: Case, inputs: Sequence[Any]) -> Any:
    return [0.0]


def fails(error: BaseException, only: Case | None = None) -> Answer:
    def answer(case: Case, inputs: Sequence[Any]) -> Any:
        if only is None or case == only:
            raise error
        return inputs

    return answer


def run(answer: Answer, check: Check = CHECK) -> CheckReport:
    submission: Any = Ran(answer)
    return examine("02/f", check, submission, seed="1", hidden=[HIDDEN])


def passed(report: CheckReport) -> list[bool]:
    return [result.passed for result in report.results]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (fails(DeadlockError("Ranks 0 and 1 wait.")), "The ranks wait for one another"),
        (fails(MismatchError("3 and 4 elements.")), "that do not fit together"),
        (fails(RankTimeout("It took 9 s.")), "The ranks took longer than their limit"),
        (fails(RankError("Rank 0 raised 1.5.", rank=0)), "A rank raised an exception"),
        (fails(RanksError("1.5 is left.")), "The ranks did not run to their end"),
        (wrong, "The result or the behaviour of the function is wrong in this case"),
    ],
)
def test_of_a_hidden_case_only_the_kind_of_failure_is_told(answer: Answer, message: str) -> None:
    examined = run(lambda case, inputs: answer(case, inputs) if case == HIDDEN else inputs)
    assert passed(examined) == [True, False]
    shown = for_the_student(examined)
    reason = shown.results[1].reason
    assert message in reason
    assert "1.5" not in f"{shown} {reason} {shown.results[1].detail}"
    assert examined.results[1].reason != reason  # the instructor reads all of it


@pytest.mark.parametrize(
    "error", [OutOfTime("60 s are used up."), SubmissionError("f is not defined")]
)
def test_what_is_the_submissions_alone_is_told_as_it_is(error: RanksError) -> None:
    examined = run(fails(error, HIDDEN))
    assert for_the_student(examined).results[1].reason == error.summary


@pytest.mark.parametrize(
    ("error", "limits"),
    [
        (OutOfTime("60 s are used up."), [f"{TIME}, in public of 02/f"]),
        (RankTimeout("It took 9 s."), [f"{TIME}, in public of 02/f"]),
        (OverMemory("Too much."), [f"{MEMORY}, in public of 02/f"]),
        (DeadlockError("Ranks 0 and 1 wait."), []),
    ],
)
def test_a_limit_that_was_met_is_kept(error: RanksError, limits: list[str]) -> None:
    assert limits_of(run(fails(error, PUBLIC))) == limits


def test_an_accident_of_the_graders_costs_nobody_points() -> None:
    with pytest.raises(MachineFailure, match=r"(?s)The grader itself failed in 02/f..*an accident"):
        run(fails(KeyError("an accident"), PUBLIC))


def test_a_judge_that_breaks_costs_that_case_and_somebody_is_told() -> None:
    def breaks(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
        if case == PUBLIC:
            raise ZeroDivisionError("in the judge")

    examined = run(right, check=replace(CHECK, judge=breaks))
    assert passed(examined) == [False, True]
    assert "in the judge" in notes_on(examined)[0]


@pytest.mark.parametrize("error", [MachineFailure("it ended"), SandboxUnavailable("no bwrap")])
def test_nobody_is_graded_where_the_sandbox_fails(error: Exception) -> None:
    with pytest.raises(type(error)):
        run(fails(error))


def test_nobody_is_graded_where_a_failed_sandbox_was_overlooked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A judge may swallow the loss of the sandbox."""

    def gone(_: Ran) -> None:
        raise MachineFailure("The sandbox has ended")

    monkeypatch.setattr(Ran, "check_alive", gone)
    with pytest.raises(MachineFailure):
        run(wrong)


def test_nobody_is_graded_where_the_inputs_cannot_be_drawn() -> None:
    def inputs(case: Case, generator: Any) -> Any:
        raise IndexError("beyond the shapes")

    with pytest.raises(
        AuthorError, match="02/f: the inputs of the case 'public' could not be made"
    ):
        run(right, check=replace(CHECK, inputs=inputs))
