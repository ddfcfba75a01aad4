"""Questions on a student's own run: made here from the submitted code and the student's id."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autograder.examination.submission import Submission, Taken
from autograder.sandbox.sandbox import MachineFailure
from autograder.sandbox.unavailable import SandboxUnavailable
from course_lib.checking.cases import AuthorError, Case, Check, Wrong
from course_lib.checking.defence import Defence
from course_lib.ranks.explain.errors import RanksError


def asked(
    defence: Defence,
    about: Check,
    passed: bool,
    submission: Submission,
    taken: Taken | None,
    student: str,
) -> Check:
    """Return the check with this student's questions as its cases.

    Args:
        defence: the check of the answers.
        about: the check of the task that is asked about.
        passed: whether the submission has all points of that task.
        submission: runs the task's solution for the questions.
        taken: that solution.
        student: the student's id.

    Raises:
        AuthorError: the questions could not be made.
        MachineFailure: the machine failed.

    """
    if not passed:
        return _none(
            defence, f"questions are asked only about a {defence.of} that passes its check"
        )
    try:
        return defence.asked(about, submission.runner(None, taken), student)
    except RanksError as error:
        return _none(
            defence, f"your {defence.of} fails in the case of your questions: {error.summary}"
        )
    except (MachineFailure, SandboxUnavailable):
        raise
    except Exception:
        trace = traceback.format_exc()[-3500:]
        raise AuthorError(f"the questions on {defence.of} could not be made: {trace}") from None


def _none(defence: Defence, why: str) -> Check:
    def refuse(case: Case, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        raise Wrong(why)

    return replace(defence, cases=(Case("your questions", 1),), judge=refuse)
