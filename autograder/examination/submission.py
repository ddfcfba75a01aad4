"""One submission under examination: its notebook process, and its ranks case by case.

This is the examiner's side. It never runs or unpickles anything that a student made. It gets only
frames of plain bytes, the exit status of processes, and the messages that the fabric carries.
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autograder.examination._channel import Channel
from autograder.examination.booth import tapes_played_in
from autograder.examination.budget import Budget, Deadline, Limits, OutOfTime
from autograder.examination.case import CaseRanks, SubmissionError
from autograder.examination.node import NodeRanks, On
from autograder.sandbox.place import Cell, SandboxedPlace
from course_lib.checking.cases import Case, Check, Observed
from course_lib.checking.limits import MAX_TEXT, seconds_of
from course_lib.checking.on_ranks.frames import Frame
from course_lib.checking.on_ranks.wire import Plain, WireError, decode, encode
from course_lib.checking.program import pack_program
from course_lib.checking.run_check import Runner
from course_lib.ranks.explain.errors import RanksError


@dataclass(frozen=True)
class CellOutcome:
    """The result of running one cell of the submission."""

    stdout: str = ""
    stderr: str = ""
    error: str = ""
    """Kind and message of the exception, in one line; empty if there was none."""
    trace: str = ""


class _NotebookEnded(Exception):
    """The notebook process gives no more answers; the message says why."""


class Submission:
    """A submission in its sandbox. Cells are run in order; checks may follow any of them.

    If student code ends the notebook process, the next request starts it again, in a new cell of
    the sandbox. The new process runs the earlier cells again, except the one that ended the
    old process.

    Args:
        place: the sandbox in which it runs.
        limits: the limits of its time.

    Attributes:
        budget: the part of its time that it has used.

    """

    def __init__(self, place: SandboxedPlace, limits: Limits | None = None) -> None:
        self._place = place
        self.budget = Budget(limits or Limits(), place.cores)
        self._cells: list[tuple[int, str]] = []
        self._stopped: list[tuple[int, str, str]] = []
        self._notebook: tuple[Channel, Cell] | None = None
        self._taken: dict[str, tuple[int, bytes | SubmissionError]] = {}
        self._kept = contextlib.ExitStack()

    # The notebook --------------------------------------------------------------------------

    def run_cell(self, source: str, number: int | None = None) -> CellOutcome:
        """Run one cell of the submission and return what it printed or raised.

        `number` appears in tracebacks, as in ``Cell In[3]``; by default the cells are counted.
        """
        number = len(self._cells) + 1 if number is None else number
        try:
            answer = self._ask_notebook(Frame.CELL, {"source": source, "number": number})
        except (_NotebookEnded, OutOfTime) as ended:
            self._stopped.append((number, source, str(ended)))
            return CellOutcome(error=str(ended))
        self._cells.append((number, source))
        error, trace = "", ""
        if isinstance(told := answer.get("error"), dict):
            self._place.make_sure()
            error = f"{_text(told.get('kind'))}: {_text(told.get('message'))}"
            trace = _text(told.get("trace"))
            self._stopped.append((number, source, error))
        return CellOutcome(_text(answer.get("stdout")), _text(answer.get("stderr")), error, trace)

    def _ask_notebook(self, kind: Frame, request: dict[str, Plain]) -> dict[str, Any]:
        kind_of_answer, payload = self._ask(kind, request)
        if kind_of_answer == Frame.FUNCTION:
            return {"function": payload}
        try:
            answer = decode(payload)
            if not isinstance(answer, dict):
                raise WireError("not a dict")
        except WireError:
            self._end_notebook()
            raise _NotebookEnded(
                "the notebook's process gave an answer that could not be read, so the grader ended "
                "that process"
            ) from None
        return answer

    def _ask(self, kind: Frame, request: dict[str, Plain]) -> tuple[int, bytes]:
        channel, cell = self._notebook or self._start_notebook()
        deadline = self.budget.of(self.budget.limits.cell)
        self._place.watch_memory()
        channel.queue(kind, encode(request))
        try:
            with self.budget:
                return channel.ask(deadline, self._look)
        except _NotebookEnded:
            self._end_notebook()
            raise
        except TimeoutError:
            self._place.make_sure()
            self._end_notebook()
            raise _NotebookEnded(f"the cell took longer than {deadline.seconds:.3g} s") from None
        except WireError:
            self._end_notebook()
            raise _NotebookEnded("the cell wrote into the grader's connection") from None
        except EOFError:
            why = self._place.why_ended(cell)
            self._end_notebook()
            raise _NotebookEnded(f"the cell ended the Python process: {why}") from None
        except BaseException:
            self._end_notebook()
            raise

    def _look(self) -> None:
        if over := self._place.over_memory():
            raise _NotebookEnded(f"the cell was stopped, because {over}")

    def _start_notebook(self) -> tuple[Channel, Cell]:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                cell = self._place.cell(
                    "autograder.inside.examinee:serve_notebook", {}, [theirs.fileno()]
                )
            except BaseException:
                ours.close()
                raise
        channel = Channel(ours)
        self._notebook = channel, cell
        if not channel.wait_until_ready():
            raise self._place.broken("The notebook's process did not start")
        for number, source in self._cells:
            self._ask(Frame.CELL, {"source": source, "number": number})
        return self._notebook

    def _end_notebook(self) -> None:
        if self._notebook is not None:
            channel, cell = self._notebook
            self._notebook = None
            channel.close()
            cell.close()

    def close(self) -> None:
        """End everything that runs for this submission."""
        self._end_notebook()
        self._kept.close()

    def __enter__(self) -> Submission:
        self._kept.enter_context(tapes_played_in(self._place))
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The ranks -----------------------------------------------------------------------------

    def runner(self, on: On | None = None) -> Runner:
        """Return a runner for the cases of one check.

        Args:
            on: the kind of real ranks; by default, ranks whose messages the fabric here carries.

        """
        program: bytes | None = None

        def run(check: Check, case: Case, inputs: Sequence[Plain]) -> Observed:
            nonlocal program
            program = program or pack_program(check.program)
            function = self._take(check.function)
            deadline = self.budget.of(seconds_of(check, self.budget.limits.case))
            self._place.watch_memory()
            if on is not None:
                k = case.world_size
                with NodeRanks(self._place, k, program, function, on) as real:
                    return Observed(self._outputs(real, inputs, deadline))
            computes = [check.computes(mine) for mine in inputs] if check.computes else ()
            with CaseRanks(self._place, case, program, function, case.network, computes) as ranks:
                try:
                    outputs = self._outputs(ranks, inputs, deadline)
                except RanksError as error:
                    error.trace = ranks.trace  # type: ignore[attr-defined]
                    raise
                return Observed(outputs, ranks.trace, case.network, ranks.touched)

        return run

    def _outputs(
        self, ranks: CaseRanks | NodeRanks, inputs: Sequence[Plain], deadline: Deadline
    ) -> list[Any]:
        """Run a case; the student's clock runs only while the student's code runs."""
        ranks.start(inputs)
        try:
            with self.budget:
                return ranks.run(deadline)
        except RanksError as error:
            raise ranks.blame(error) from None

    def check_alive(self) -> None:
        """Make sure that the sandbox has not failed, even if its error was caught somewhere.

        Raises:
            MachineFailure: the sandbox has failed.

        """
        self._place.check_alive()

    def _take(self, function: str) -> bytes:
        """Return the function as the notebook process hands it over, after the cells so far.

        Raises:
            SubmissionError: it was not handed over; a new attempt follows only after another cell.

        """
        cells = len(self._cells)
        taken = self._taken.get(function)
        if taken is None or taken[0] != cells:
            self._taken.clear()  # keep one function only: it may be large
            taken = self._taken[function] = cells, self._asked_for(function)
        if isinstance(taken[1], SubmissionError):
            raise taken[1]
        return taken[1]

    def _asked_for(self, function: str) -> bytes | SubmissionError:
        try:
            answer = self._ask_notebook(Frame.TAKE, {"name": function})
        except _NotebookEnded as ended:
            why = str(ended).replace("the cell", "reading the function", 1)
            return SubmissionError(
                f"{function} could not be read from the notebook: {why}. All global names that the "
                "function uses are read with it, so keep no large objects in them."
            )
        packed = answer.get("function")
        if isinstance(packed, bytes):
            return packed
        why = _text(answer.get("error")) or f"{function} could not be read from the notebook"
        return SubmissionError(f"{why}{self._cell_that_should_define(function)}")

    def _cell_that_should_define(self, function: str) -> str:
        """Return a sentence on the last failed cell whose source names the function."""
        for number, source, error in reversed(self._stopped):
            if re.search(rf"\b{re.escape(function)}\b", source):
                return f". Cell {number} contains this name, but did not run to its end: {error}"
        return ""


def _text(value: Any) -> str:
    return value[: 2 * MAX_TEXT] if isinstance(value, str) else ""
