"""Questions on a student's own run: made here from the submitted code and the student's id."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autograder.errors import SandboxUnavailable
from autograder.examination.submission import Submission, Taken
from autograder.sandbox.sandbox import MachineFailure
from course_lib.checking.cases import AuthorError, Case, Check, Observed, Wrong
from course_lib.checking.defence import Defence
from course_lib.ranks.explain.errors import RanksError
from course_lib.ranks.trace.trace import Trace

_DEF = re.compile(r"\bdef\s+(\w+)")


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
    runner = submission.runner(None, taken)

    def run(check: Check, case: Case, inputs: Sequence[Any]) -> Observed:
        observed = runner(check, case, inputs)
        assert isinstance(observed, Observed) and observed.trace is not None
        return replace(observed, trace=_believed(observed.trace, submission.sources))

    try:
        return defence.asked(about, run, student)
    except Wrong as wrong:
        return _none(defence, wrong.message)
    except RanksError as error:
        return _none(
            defence, f"your {defence.of} fails in the case of your questions: {error.summary}"
        )
    except (MachineFailure, SandboxUnavailable):
        raise
    except Exception:
        trace = traceback.format_exc()[-3500:]
        raise AuthorError(f"the questions on {defence.of} could not be made: {trace}") from None


def _believed(trace: Trace, sources: Sequence[str]) -> Trace:
    """Return the trace with only the lines that a submitted function can have.

    A student's process says itself which of its lines runs, and nothing here can check that. A lie
    only changes this student's own questions, or the right answers to them; no other student and
    no other task depends on it. A line that is in no submitted function is nothing to ask about.
    """
    cells = [(set(_DEF.findall(source)), 1 + source.count("\n")) for source in sources]

    def exists(function: str, line: int) -> bool:
        name = function.rpartition(".")[2]
        return any(name in names and line <= length for names, length in cells)

    events = [
        event._replace(lines=tuple(pair for pair in event.lines if exists(*pair)))
        for event in trace.events
    ]
    return Trace(events, trace.world_size, network=trace.network)


def _none(defence: Defence, why: str) -> Check:
    def refuse(case: Case, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        raise Wrong(why)

    return replace(defence, cases=(Case("your questions", 1),), judge=refuse)
