"""Run one check of one submission so that no answer can damage anything else.

A student loses points only if a judge finds a fault, or if `CaseRanks.blame` confirms an error.
Any other error here is not the student's fault and becomes a `MachineFailure`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace

from autograder.examination.case import On
from autograder.examination.submission import Submission, Taken
from autograder.sandbox.place import MachineFailure
from autograder.sandbox.unavailable import SandboxUnavailable
from course_lib.checking import Case, CaseResult, Check, CheckReport
from course_lib.checking.cases import AuthorError
from course_lib.checking.local import WORDS
from course_lib.checking.run_check import run_on_each

CARRIED = "the grader's network"
_WRONG = "The result or the behaviour of the function is wrong in this case."


def examine(
    name: str,
    check: Check,
    submission: Submission,
    *,
    seed: str,
    hidden: Iterable[Case] = (),
    on: On | None = None,
    taken: Taken | None = None,
    progress: Callable[[CaseResult], None] = lambda _: None,
) -> CheckReport:
    """Run the check's cases and return the result, even if the answers make its judge fail.

    With `on`, cases that pass on the grader's network run once more on real ranks. Then the values
    of the real ranks decide. Ranks that ask the examiner, or that have no code of the student, run
    only on its network.

    Raises:
        MachineFailure: the machine or our own code failed, so there is no verdict.
        SandboxUnavailable: there is no sandbox.
        AuthorError: the check is broken.

    """
    runners = {"": submission.runner(taken=taken)}
    if on is not None and check.answers is None and not check.only_on:
        runners = {CARRIED: runners[""], WORDS[on]: submission.runner(on, taken)}
    try:
        report = run_on_each(
            name, check, runners, seed=seed, hidden=tuple(hidden), progress=progress
        )
    except (MachineFailure, SandboxUnavailable, AuthorError):
        raise
    except Exception as error:
        trace = traceback.format_exc()[-3500:]
        raise MachineFailure(
            f"The grader itself failed in {name}. No student loses points by this error. "
            f"Please report it: {trace}"
        ) from error
    submission.check_alive()
    return report


def for_the_student(report: CheckReport) -> CheckReport:
    """Return the student's version: of a failed hidden case, it has only the kind of failure."""
    results = (
        replace(result, reason=result.in_short or _WRONG, detail="")
        if result.hidden and not result.passed and result.ran
        else result
        for result in report.results
    )
    return replace(report, results=tuple(results))


def notes_on(report: CheckReport) -> list[str]:
    """Return the exceptions inside the check, for its author."""
    return [
        f"{report.name}: the check itself raised an exception in case {result.name!r}: "
        f"{result.trouble[-3500:]}"
        for result in report.results
        if result.trouble
    ]


def limits_of(report: CheckReport) -> list[str]:
    """Return the limits of time and memory that its cases reached, in words for the student."""
    return [
        f"{result.limit}, in {'a hidden case' if result.hidden else result.name} of {report.name}"
        for result in report.results
        if result.limit
    ]
