"""Write a verdict in the format that Gradescope reads: ``results.json``.

The format is documented at https://gradescope-autograders.readthedocs.io/en/latest/specs/. The
total is the sum of the tests' scores. A ``score`` for the whole submission would replace that sum.
We write none, because the page does not say whether it stays hidden when the tests are hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autograder.examination.verdict import CheckVerdict
from course_lib.checking import CaseResult, CheckReport

WHEN = {
    "after_published": "when grades are published",
    "after_due_date": "after the due date",
    "visible": "at once",
    "hidden": "only to graders",
}
"""When Gradescope shows a test to students: its word → our words. The first is the default."""
DEFAULT = next(iter(WHEN))
MAX_OUTPUT = 20_000
"""Largest number of characters of a test's output, because a student's code may make it long."""

_POINTS = "Points also depend on hidden cases. Gradescope shows the points {}."


@dataclass(frozen=True)
class Task:
    """One task of a submission.

    Attributes:
        name: its name in the notebook.
        max_score: points that it can get.
        told: the report that a student may read; a hidden case gives only the kind of failure.
        verdict: None if the task could not be examined because its notebook was not submitted.

    """

    name: str
    max_score: float
    told: str
    verdict: CheckVerdict | None = None


def results(
    tasks: Sequence[Task], *, when: str, about: Sequence[str], seconds: float
) -> dict[str, Any]:
    """Return the document for Gradescope, in which all texts are plain text.

    Each task has a test with its points, and a second test with the visible cases. The points also
    depend on hidden cases. So the test with the points is shown at the time `when`, and the test
    with the visible cases always.

    Args:
        tasks: the tasks, in the order of the notebook.
        when: one of `WHEN`.
        about: sentences on the whole submission.
        seconds: duration of grading.

    """
    tests = []
    for task in tasks:
        if when != "visible" and task.verdict is not None:
            tests.append(_visible(task.verdict))
        tests.append(
            {
                "name": f"{task.name}: points",
                "score": task.verdict.score if task.verdict else 0.0,
                "max_score": task.max_score,
                "output": _short(task.told),
                "visibility": when,
            }
        )
    return {
        "output": "\n\n".join([_POINTS.format(WHEN[when]), *about]),
        "output_format": "text",  # by default, Gradescope would interpret HTML in it
        "test_output_format": "text",
        "visibility": "visible",
        "stdout_visibility": "hidden",  # the output names hidden cases
        "execution_time": round(seconds),
        "tests": tests,
    }


def _visible(check: CheckVerdict) -> dict[str, Any]:
    """Return a test without points, with the same report on visible cases as ``check`` gives."""
    cases = [CaseResult(**case) for case in check.cases if not case["hidden"]]
    report = CheckReport(check.name, tuple(cases))
    return {
        "name": f"{check.task}: the visible cases",
        "status": "passed" if report.passed else "failed",
        "output": _short(str(report)),
        "visibility": "visible",
    }


def _short(text: str) -> str:
    return text if len(text) <= MAX_OUTPUT else f"{text[:MAX_OUTPUT]} … (cut)"
