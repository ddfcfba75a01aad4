"""One submission under examination: a sandbox, its notebook process, and ranks case by case.

The examiner's side. It runs nothing and unpickles nothing that a student made: what comes back is
frames of plain bytes, the exit status of processes, and a board of numbers and short texts.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autograder.examination.case import MAX_ANSWER, CaseRanks, SubmissionError
from autograder.sandbox.place import SandboxedPlace
from course_lib.checking.cases import Case, Check
from course_lib.checking.frames import Frame, recv_frame, send_frame
from course_lib.checking.run_check import Runner
from course_lib.checking.wire import Plain, WireError, decode, encode
from course_lib.ranks.processes.fork_client import ForkServer, ForkServerError


@dataclass(frozen=True)
class CellOutcome:
    """What running one cell of the submission gave."""

    stdout: str = ""
    stderr: str = ""
    error: str = ""
    """Kind and message of the exception, in one line; empty if there was none."""
    trace: str = ""


class Submission:
    """A submission in its sandbox. Cells are run in order; checks may follow any of them.

    When student code ends the notebook process, or the whole sandbox, the next request starts it
    anew and runs the earlier cells again, except the one that did it.

    Args:
        place: where it runs.
        cell_seconds: time limit of one cell.

    """

    def __init__(self, place: SandboxedPlace, cell_seconds: float = 30.0) -> None:
        self._place = place
        self._cell_seconds = cell_seconds
        self._cells: list[tuple[int, str]] = []
        self._server: ForkServer | None = None
        self._notebook: socket.socket | None = None
        self._notebook_pid = 0
        self._files = 0

    # The notebook --------------------------------------------------------------------------

    def run_cell(self, source: str, number: int | None = None) -> CellOutcome:
        """Run one cell of the submission and return what it printed or raised.

        `number` stands in tracebacks, as in ``Cell In[3]``; by default the cells are counted.
        """
        number = len(self._cells) + 1 if number is None else number
        try:
            answer = self._ask(Frame.CELL, {"source": source, "number": number}, self._cell_seconds)
        except TimeoutError:
            return CellOutcome(error=f"the cell took longer than {self._cell_seconds:g} s")
        except (EOFError, OSError, WireError):
            return CellOutcome(error="the cell ended the Python process that ran it")
        self._cells.append((number, source))
        error, trace = "", ""
        if isinstance(told := answer.get("error"), dict):
            error = f"{told.get('kind', '')}: {told.get('message', '')}"
            trace = str(told.get("trace", ""))
        return CellOutcome(
            str(answer.get("stdout", "")), str(answer.get("stderr", "")), error, trace
        )

    def _ask(self, kind: int, request: dict[str, Plain], seconds: float) -> dict[str, Any]:
        channel = self._notebook or self._start_notebook()
        try:
            channel.settimeout(seconds)
            send_frame(channel, kind, encode(request))
            _, payload = recv_frame(channel, MAX_ANSWER)
            answer = decode(payload)
            if not isinstance(answer, dict):
                raise WireError("the notebook process answered nonsense")
        except BaseException:
            self._end_notebook()
            raise
        return answer

    def _start_notebook(self) -> socket.socket:
        for attempt in (1, 2):
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    self._notebook_pid = self._running_server().fork(
                        "examinee:serve_notebook", {}, [theirs.fileno()]
                    )
                    break
                except ForkServerError:
                    ours.close()
                    self._end_server()
                    if attempt == 2:
                        raise
        self._notebook = ours
        for number, source in self._cells:
            self._ask(Frame.CELL, {"source": source, "number": number}, self._cell_seconds)
        return ours

    def _end_notebook(self) -> None:
        if self._notebook is not None:
            self._notebook.close()
            self._notebook = None
            if self._server is not None:
                self._server.kill([self._notebook_pid])

    def _running_server(self) -> ForkServer:
        if self._server is None or not self._server.alive():
            self._end_notebook()
            self._server = self._place.start()
        return self._server

    def _end_server(self) -> None:
        self._end_notebook()
        if self._server is not None:
            self._server.close()
            self._server = None

    def close(self) -> None:
        """End everything that runs for this submission."""
        self._end_server()

    def __enter__(self) -> Submission:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The ranks -----------------------------------------------------------------------------

    def runner(self, short_name: str) -> Runner:
        """Return what runs the cases of the check that ``checks.py`` has under `short_name`."""
        taken: tuple[ForkServer, str] | None = None

        def run(check: Check, case: Case, inputs: Sequence[Plain]) -> list[Any]:
            nonlocal taken
            server = self._running_server()
            if taken is None or taken[0] is not server:  # in a new sandbox its file is gone
                taken = server, self._take(check.function)
            with CaseRanks(server, case, taken[1], short_name, self._place) as team:
                return team.run(inputs, check.seconds)

        return run

    def _take(self, function: str) -> str:
        self._files += 1
        path = f"{self._place.scratch}/function-{self._files}"
        try:
            answer = self._ask(Frame.TAKE, {"name": function, "path": path}, 30.0)
        except (TimeoutError, EOFError, OSError, WireError):
            raise SubmissionError(f"{function} could not be read from the notebook") from None
        if answer.get("error") is not None:
            raise SubmissionError(str(answer["error"]))
        return path
