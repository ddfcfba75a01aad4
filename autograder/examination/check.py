"""Run one check of one submission so that no answer can damage anything else.

A student loses points only if a judge finds a fault, or if `CaseRanks.blame` confirms an error.
Any other error here is not the student's fault and becomes a `MachineFailure`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autograder.examination.budget import OutOfTime
from autograder.examination.case import On, OverMemory, SubmissionError
from autograder.examination.submission import MEMORY, TIME, Submission, Taken
from autograder.sandbox.place import MachineFailure
from autograder.sandbox.unavailable import SandboxUnavailable
from course_lib.checking import Case, CaseResult, Check, CheckReport, run_check
from course_lib.checking.local import WORDS
from course_lib.checking.run_check import Runner
from course_lib.ranks.explain.errors import (
    DeadlockError,
    MismatchError,
    RankError,
    RanksError,
    RankTimeout,
)
from course_lib.ranks.wire import Plain

CARRIED = "the grader's network"

_OF_HIDDEN = (
    ((OutOfTime, SubmissionError), ""),
    ((DeadlockError,), "The ranks wait for one another, or did not finish a communication."),
    ((MismatchError,), "The ranks called operations that do not fit together."),
    ((RankTimeout,), "The case took longer than its limit."),
    ((RankError,), "A rank raised an exception, or its process ended."),
    ((RanksError,), "The case did not run to its end."),
)
"""A student reads only this about a failed hidden case, so that it cannot reveal its inputs."""
_WRONG = "The result or the behaviour of the function is wrong in this case."


@dataclass
class Examined:
    """The result of a check.

    Attributes:
        report: the whole report, for the instructor.
        told: the student's version, in which hidden cases give only the kind of failure.
        notes: exceptions inside the check, for its author.
        limits: limits of time and memory that were reached, in words.

    """

    report: CheckReport
    told: CheckReport
    notes: list[str]
    limits: list[str]


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
) -> Examined:
    """Run the check's cases and return the result, even if the answers make its judge fail.

    With `on`, cases that pass on the grader's network run once more on real ranks. Then the values
    of the real ranks decide. Ranks that ask the examiner, or that have no code of the student, run
    only on its network.

    Raises:
        MachineFailure: the machine or our own code failed, so there is no verdict.
        SandboxUnavailable: there is no sandbox.
        AuthorError: the check is broken.

    """
    hidden = tuple(hidden)
    guard = _Guard(name, check, submission, hidden, taken)
    report = guard.report(seed, hidden, progress)
    if report.passed and on is not None and check.answers is None and not check.only_on:
        places = CARRIED, WORDS[on]
        report = replace(guard.report(seed, hidden, progress, on), places=places)
        # A case that passes on the grader's network but fails on real ranks counts as failed.
        report = report if report.passed else replace(report, places=places[1:])
    submission.check_alive()
    for result in report.results:
        if result.trouble:
            guard.note(f"case {result.name!r}", result.trouble)
    told = _for_the_student(report, guard.kinds)
    return Examined(report, told, guard.notes, guard.limits)


class AuthorError(RuntimeError):
    """The check itself is broken, so no student may lose points for it."""


class _Guard:
    """Protects a check from data that comes from outside."""

    def __init__(
        self,
        name: str,
        check: Check,
        submission: Submission,
        hidden: Sequence[Case],
        taken: Taken | None,
    ) -> None:
        self.notes: list[str] = []
        self.kinds: dict[str, str] = {case.name: case.told for case in hidden if case.told}
        self.limits: list[str] = []
        self._name = name
        self._hidden = {case.name for case in hidden}
        self._check = check
        self._submission = submission
        self._taken = taken
        self._run: Runner = submission.runner()
        self.check = replace(check, inputs=self._inputs)

    def report(
        self,
        seed: str,
        hidden: Sequence[Case],
        progress: Callable[[CaseResult], None],
        on: On | None = None,
    ) -> CheckReport:
        """Run all cases, on real ranks of the kind `on` if it is given."""
        self._run = self._submission.runner(on, self._taken)
        return run_check(
            self._name, self.check, self.run, seed=seed, hidden=hidden, progress=progress
        )

    def note(self, what: str, trace: str) -> None:
        """Keep an escaped exception for the author."""
        self.notes.append(
            f"{self._name}: the check itself raised an exception in {what}: {trace[-3500:]}"
        )

    def run(self, check: Check, case: Case, inputs: Sequence[Plain]) -> Any:
        """Run a case; record its kind of failure."""
        try:
            return self._run(check, case, inputs)
        except RanksError as error:
            words = next(words for kinds, words in _OF_HIDDEN if isinstance(error, kinds))
            self.kinds[case.name] = words or error.summary
            if limit := _limit(error):  # a student reads it
                which = "a hidden case" if case.name in self._hidden else case.name
                self.limits.append(f"{limit}, in {which} of {self._name}")
            raise
        except (MachineFailure, SandboxUnavailable, AuthorError):
            raise
        except Exception as error:
            trace = traceback.format_exc()[-3500:]
            raise MachineFailure(
                f"The grader itself failed in {self._name}. No student loses points by this error. "
                f"Please report it: {trace}"
            ) from error

    def _inputs(self, case: Case, generator: Any) -> Sequence[Plain]:
        try:
            return self._check.inputs(case, generator)
        except Exception as error:
            raise AuthorError(
                f"{self._name}: the inputs of the case {case.name!r} could not be made"
            ) from error


def _limit(error: RanksError) -> str:
    if isinstance(error, (OutOfTime, RankTimeout)):
        return TIME
    return MEMORY if isinstance(error, OverMemory) else ""


def _for_the_student(report: CheckReport, kinds: dict[str, str]) -> CheckReport:
    results = (
        replace(result, reason=kinds.get(result.name, _WRONG), detail="")
        if result.hidden and not result.passed and result.ran
        else result
        for result in report.results
    )
    return replace(report, results=tuple(results))
