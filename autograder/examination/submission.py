"""One submission under examination: its notebook process, and its ranks case by case.

This is the examiner's side. It never runs or unpickles anything that a student made. It gets only
plain values, the exit status of processes, and the messages that the fabric carries.

A student loses points only if a judge finds a fault, or if `CaseRanks.blame` confirms an error.
Any other error is not the student's fault, and there is no verdict.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autograder.course import Settings
from autograder.examination._channel import Channel, Message
from autograder.examination.budget import Budget, Deadline, OutOfTime, SubmissionError
from autograder.examination.case import CaseRanks, On
from autograder.sandbox.sandbox import Cell, Sandbox
from course_lib.checking.cases import Case, Check, Observed
from course_lib.checking.loading import pack_program
from course_lib.checking.local import WORDS
from course_lib.checking.report import CheckReport
from course_lib.checking.run_check import Runner, run_on_each
from course_lib.limits import BRIEFLY, INTERRUPT_SECONDS, MAX_TEXT
from course_lib.ranks.explain.errors import RanksError
from course_lib.ranks.wire import Plain, WireError

MAX_FUNCTIONS = 192 * 2**20
"""Bytes of all functions that a notebook hands over."""
CARRIED = "the grader's network"

_UNREADABLE = "gave an answer that could not be read, so the grader ended its process"
Taken = bytes | SubmissionError
"""A function as the notebook handed it over, or why it did not."""


@dataclass(frozen=True)
class CellOutcome:
    """The result of running one cell of the submission."""

    stdout: str = ""
    stderr: str = ""
    error: str = ""
    """Kind and message of the exception, in one line; empty if there was none."""
    trace: str = ""


class _NotebookEnded(Exception):
    """The notebook process gives no more answers; the message says what its request did."""


class _TookTooLong(_NotebookEnded):
    """The notebook process has not answered within its time."""


class Submission:
    """A submission in its sandbox. Cells are run in order; checks may follow any of them.

    No notebook process exists while ranks run. Otherwise ranks, whose inputs are secret, would have
    somebody to tell them to, and a later cell could print them into the feedback. So first run all
    cells, and `take` each function where its test cell is; then run the checks.

    If student code ends the notebook process, or a check ends it, the next request starts it again,
    in a new cell of the sandbox. The new process runs the earlier cells again, except the one that
    ended the old process.

    Args:
        sandbox: the sandbox in which it runs.
        settings: the limits of its time.

    Attributes:
        exploration: the time that its other cells have, apart from those with solutions.
        budget: the time that its solutions and their checks have.

    """

    def __init__(self, sandbox: Sandbox, settings: Settings | None = None) -> None:
        self._sandbox = sandbox
        self.exploration = Budget(settings or Settings(), sandbox.cores)
        self.budget = Budget(settings or Settings(), sandbox.cores)
        self._cells: list[tuple[int, str]] = []
        self._stopped: list[tuple[int, str, str]] = []
        self._notebook: tuple[Channel, Cell] | None = None
        self._room = MAX_FUNCTIONS

    # The notebook --------------------------------------------------------------------------

    def run_cell(
        self, source: str, number: int | None = None, exploring: bool = False
    ) -> CellOutcome:
        """Run one cell of the submission and return what it printed or raised.

        Args:
            source: the cell.
            number: appears in tracebacks, as in ``Cell In[3]``; by default the cells are counted.
            exploring: whether its time counts as `exploration`. When that is used up, such a cell
                may still run for `BRIEFLY`, because it may define something that is needed.

        """
        number = len(self._cells) + 1 if number is None else number
        budget, seconds = self.budget, self.budget.settings.cell_seconds
        if exploring and self.exploration.left > 0:
            budget = self.exploration
        elif exploring:
            seconds = min(seconds, BRIEFLY)
        try:
            outcome = self._run(source, number, budget, seconds)
        except OutOfTime as ended:
            outcome = CellOutcome(error=str(ended))
        except _NotebookEnded as ended:
            outcome = CellOutcome(error=f"the cell {ended}")
        if outcome.error:
            self._stopped.append((number, source, outcome.error))
        return outcome

    def _run(self, source: str, number: int, budget: Budget, seconds: float) -> CellOutcome:
        deadline, error, trace = budget.of(seconds), "", ""
        try:
            request: dict[str, Plain] = {"source": source, "number": number}
            answer = self._outcome_in(self._ask("run", request, budget, deadline))
        except _TookTooLong as late:
            answer = self._interrupt(late)
            error = f"the cell {late}, so it was interrupted"
        else:
            self._cells.append((number, source))
            if isinstance(failure := answer.get("error"), dict):
                self._sandbox.make_sure()
                error = f"{_text(failure.get('kind'))}: {_text(failure.get('message'))}"
                trace = _text(failure.get("trace"))
        return CellOutcome(_text(answer.get("stdout")), _text(answer.get("stderr")), error, trace)

    def _interrupt(self, late: _TookTooLong) -> dict[Any, Any]:
        """Interrupt the cell that runs, as Jupyter does; what earlier cells defined is kept.

        Raises:
            _NotebookEnded: the cell does not end; its process was ended.

        """
        if self._notebook is None:  # it was about to run the earlier cells again
            raise late
        channel, cell = self._notebook
        cell.interrupt()
        try:
            with self.budget:
                return self._outcome_in(channel.ask(self.budget.of(INTERRUPT_SECONDS), self._look))
        except BaseException as error:
            self._end_notebook()
            if isinstance(error, TimeoutError | WireError | EOFError | OutOfTime):
                raise late from None
            raise

    def _outcome_in(self, message: Message) -> dict[Any, Any]:
        match message:
            case ("ran", {**outcome}):
                return outcome
        self._end_notebook()
        raise _NotebookEnded(_UNREADABLE)

    def _ask(self, kind: str, request: Plain, budget: Budget, deadline: Deadline) -> Message:
        channel, cell = self._notebook or self._start_notebook(budget)
        self._sandbox.watch_memory()
        channel.send(kind, request)
        try:
            with budget:
                return channel.ask(deadline, self._look)
        except TimeoutError:  # the process still runs, and may be interrupted
            self._sandbox.make_sure()
            raise _TookTooLong(f"took longer than {deadline.seconds:.3g} s") from None
        except WireError:
            self._end_notebook()
            raise _NotebookEnded("wrote into the grader's connection") from None
        except EOFError:
            reason = self._sandbox.why_ended(cell)
            self._end_notebook()
            raise _NotebookEnded(f"ended the Python process: {reason}") from None
        except BaseException:
            self._end_notebook()
            raise

    def _look(self) -> None:
        if over := self._sandbox.over_memory():
            raise _NotebookEnded(f"was stopped, because {over}")

    def _start_notebook(self, budget: Budget) -> tuple[Channel, Cell]:
        ours, child_end = socket.socketpair()
        with child_end:
            try:
                run = "autograder.inside.examinee:serve_notebook"
                cell = self._sandbox.cell(run, {}, [child_end.fileno()], locks=True, own_ranks=True)
            except BaseException:
                ours.close()
                raise
        channel = Channel(ours)
        self._notebook = channel, cell
        if not channel.wait_until_ready():
            raise self._sandbox.broken("The notebook's process did not start")
        for number, source in self._cells:
            deadline = budget.of(budget.settings.cell_seconds)
            try:
                self._ask("run", {"source": source, "number": number}, budget, deadline)
            except _TookTooLong:
                self._end_notebook()
                raise
        return self._notebook

    def _end_notebook(self) -> None:
        if self._notebook is not None:
            channel, cell = self._notebook
            self._notebook = None
            channel.close()
            cell.close()

    def __enter__(self) -> Submission:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_notebook()

    @property
    def sources(self) -> list[str]:
        """The sources of the cells that were run, whether to their end or not."""
        ran, stopped = self._cells, self._stopped
        return [*(source for _, source in ran), *(source for _, source, _ in stopped)]

    # The ranks -----------------------------------------------------------------------------

    def runner(self, on: On | None = None, payload: Taken | None = None) -> Runner:
        """Return a runner for the cases of one check.

        Args:
            on: the kind of real ranks; by default, ranks whose messages the fabric here carries.
            payload: what `take` returned; by default, it is called before the first case.

        """
        program: bytes | None = None

        def run(check: Check, case: Case, inputs: Sequence[Plain]) -> Observed:
            nonlocal program, payload
            program = program or pack_program(check.program)
            payload = self.take(check.function) if payload is None else payload
            if isinstance(payload, SubmissionError):
                raise payload
            self._end_notebook()  # ranks have secret inputs, and must have nobody to tell
            deadline = self.budget.of(check.case_seconds(self.budget.settings.case_seconds))
            self._sandbox.watch_memory()
            with CaseRanks(self._sandbox, check, case, inputs, program, payload, on) as ranks:
                ranks.start()
                try:
                    with self.budget:  # the student's clock runs only while the student's code runs
                        outputs = ranks.run(deadline)
                except RanksError as error:
                    blamed = ranks.blame(error)
                    blamed.trace = ranks.trace
                    raise blamed from None
                network = case.network if on is None else None
                return Observed(outputs, ranks.trace, network, ranks.touched)

        return run

    def check_alive(self) -> None:
        """Make sure that the sandbox has not failed, even if its error was caught somewhere.

        Raises:
            MachineFailure: the sandbox has failed.

        """
        self._sandbox.check_alive()

    def take(self, function: str) -> Taken:
        """Return the function as the notebook process hands it over, after the cells so far.

        If it was not handed over, the error is returned.
        """
        try:
            deadline = self.budget.of(self.budget.settings.cell_seconds)
            answer = self._ask("take", function, self.budget, deadline)
        except OutOfTime as over:
            return SubmissionError(over.summary)
        except _NotebookEnded as ended:
            self._end_notebook()
            return SubmissionError(
                f"{function} could not be read from the notebook: reading the function {ended}. "
                "All global names that the function uses are read with it, so keep no large "
                "objects in them."
            )
        match answer:
            case ("function", bytes(packed)):
                self._room -= len(packed)
                if self._room >= 0:
                    return packed
                return SubmissionError(
                    f"{function} could not be kept: the functions of this notebook, with all "
                    f"global names that they use, are larger than {MAX_FUNCTIONS // 2**20} MiB "
                    "together."
                )
            case ("refused", str(why)):
                return SubmissionError(f"{_text(why)}{self._cell_that_should_define(function)}")
        self._end_notebook()
        reason = f"reading the function {_UNREADABLE}"
        return SubmissionError(f"{function} could not be read from the notebook: {reason}.")

    def _cell_that_should_define(self, function: str) -> str:
        """Return a sentence on the last failed cell whose source names the function."""
        for number, source, error in reversed(self._stopped):
            if re.search(rf"\b{re.escape(function)}\b", source):
                return f". Cell {number} contains this name, but did not run to its end: {error}"
        return ""


def _text(value: Any) -> str:
    return value[: 2 * MAX_TEXT] if isinstance(value, str) else ""


def examine(
    name: str,
    check: Check,
    submission: Submission,
    *,
    seed: str,
    hidden: Iterable[Case] = (),
    on: On | None = None,
    payload: Taken | None = None,
) -> CheckReport:
    """Run the check's cases and return the result, even if the answers make its judge fail.

    With `on`, cases that pass on the grader's network run once more on real ranks. Then the values
    of the real ranks decide. Ranks that ask the examiner, or that have no code of the student, run
    only on its network.

    Raises:
        MachineFailure: the machine failed. After this and any other error, there is no verdict.
        SandboxUnavailable: there is no sandbox.
        AuthorError: the check is broken.

    """
    runners = {"": submission.runner(payload=payload)}
    if on is not None and check.answers is None and not check.only_on:
        runners = {CARRIED: runners[""], WORDS[on]: submission.runner(on, payload)}
    report = run_on_each(name, check, runners, seed=seed, hidden=tuple(hidden))
    submission.check_alive()
    return report
