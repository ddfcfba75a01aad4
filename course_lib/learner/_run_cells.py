"""Run cells and checks in a new process, which shows their output in the terminal.

A limit of time does not run while the process waits for a core. A cell that cannot be interrupted
is killed with its process.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from math import inf
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from nbformat import NotebookNode

from course_lib.learner import CannotGoOn, _in_shell
from course_lib.learner.what_counts import grade_id, is_check, role
from course_lib.limits import (
    CELL_SECONDS,
    CELLS_SECONDS,
    INTERRUPT_SECONDS,
    OTHERS,
    SOLUTIONS,
    clock_of,
    limit_of,
)

LOOK_EVERY = 1.0
"""Seconds between two looks at the process and its clock."""
START_SECONDS = 300.0


Step = tuple[int, NotebookNode]
"""A cell that is run, and its place among the code cells."""


def run_steps(steps: list[Step], folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Run the steps in a new process; return the outcome of each check, and notes.

    A cell that lasts longer than its limit is interrupted. If it does not end, its process is
    killed, and a new one runs the other cells and the checks that are left.

    Raises:
        CannotGoOn: the process did not start, or has ended by itself.

    """
    results = _Results()
    while True:
        with _started(folder) as shell:
            stuck = next((step for step in steps if not results.add(*step, shell)), None)
        if stuck is None:
            return results.checks, results.notes
        steps = [s for s in steps if s is not stuck and grade_id(s[1]) not in results.checks]


class _Results:
    """The outcome of each check, notes on cells, and the time that is left for cells."""

    def __init__(self) -> None:
        self.checks: dict[str, Any] = {}
        self.notes: list[str] = []
        self._left = {SOLUTIONS: CELLS_SECONDS, OTHERS: CELLS_SECONDS}
        self._failures: list[tuple[str, str]] = []  # the source of a cell, and why it failed

    def note(self, text: str) -> None:
        """Add a note, once: a second process repeats the cells of the first."""
        self.notes += [text] if text not in self.notes else []

    def add(self, number: int, cell: NotebookNode, shell: _Shell) -> bool:
        """Run a cell and keep what it gives; return False if it could not be interrupted."""
        kind = SOLUTIONS if role(cell).get("solution") else OTHERS
        limit = inf if is_check(cell) else limit_of(kind, self._left[kind])  # a check has its own
        outcome = {"seconds": 0.0} if limit == 0 else shell.run(number, cell.source, limit)
        error = self._explained(outcome)
        if is_check(cell):
            reason = error or "the cell of this check does not call check any more"
            self.checks[grade_id(cell)] = {"fraction": 0.0, "reason": reason} | outcome
            print(flush=True)
            return True
        self._left[kind] -= outcome["seconds"]
        is_stuck = outcome.get("is_stuck", False)
        failure = f"cell {number} failed: {error}" if error else ""
        if is_stuck:
            failure = f"cell {number} could not be interrupted, so it was left out"
        if failure:
            self._failures.append((cell.source, failure))
        if outcome["seconds"] >= limit and not is_stuck:
            self.note(_late(number, kind, outcome["seconds"]))
        elif failure:
            self.note(failure)
        return not is_stuck

    def _explained(self, outcome: dict[str, Any]) -> str:
        """Return the error of a cell; of a missing name, why the first cell with it failed."""
        if name := outcome.get("missing"):
            for source, failure in self._failures:
                if re.search(rf"\b{re.escape(name)}\b", source):
                    return f"there is no {name}, because {failure}"
        return str(outcome.get("error", ""))


def _late(number: int, kind: str, seconds: float) -> str:
    """Return the note on a cell that has used up its time, or the time of its kind of cells."""
    event = f"interrupted after {seconds:.0f} s" if seconds else "not run"
    advice = "" if kind == SOLUTIONS else "; a cell with the tag explore is not run"
    return (
        f"cell {number} was {event}: as in the grader, a cell has {CELL_SECONDS:g} s, and "
        f"all {kind} together have {CELLS_SECONDS:g} s{advice}"
    )


class _Shell:
    """The process that runs the cells of a notebook, and its end of the pipe."""

    def __init__(self, process: subprocess.Popen[bytes], pipe: Connection) -> None:
        self._process, self._pipe = process, pipe

    def run(self, number: int, source: str, limit: float) -> dict[str, Any]:
        """Run a cell; return its outcome, its ``seconds``, and whether it ``is_stuck``.

        Raises:
            CannotGoOn: it has ended the process.

        """
        start = clock_of(self._process.pid)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended: see `wait`
            self._pipe.send((number, source))
        outcome = self.wait(limit)
        if outcome is None:
            self._process.send_signal(signal.SIGINT)
            outcome = self.wait(INTERRUPT_SECONDS)
        if outcome is None:
            return {"seconds": limit, "is_stuck": True}
        return {**outcome, "seconds": clock_of(self._process.pid) - start}

    def wait(self, seconds: float) -> dict[str, Any] | None:
        """Return what the process answers; None if it has not by then, on its clock.

        Raises:
            CannotGoOn: it has ended instead.

        """
        end = clock_of(self._process.pid) + seconds
        while (left := end - clock_of(self._process.pid)) > 0:
            with contextlib.suppress(EOFError, ConnectionResetError):
                if self._pipe.poll(min(left, LOOK_EVERY)):
                    outcome: dict[str, Any] = self._pipe.recv()
                    return outcome
                if self._process.poll() is None:
                    continue
            raise CannotGoOn(_ended(self._process.wait()))
        return None


@contextlib.contextmanager
def _started(folder: Path) -> Iterator[_Shell]:
    """Start a process in `folder`; at the end, kill it with all that its cells have started."""
    pipe, other_end = Pipe()
    with pipe:
        with other_end:
            # -P: as in the grader, no file beside the notebook can be imported.
            process = subprocess.Popen(
                [sys.executable, "-P", "-u", "-m", _in_shell.__name__, str(other_end.fileno())],
                cwd=folder,
                env=os.environ | {"MPLBACKEND": "agg"},
                stdin=subprocess.DEVNULL,  # as in the grader, nobody types
                pass_fds=[other_end.fileno()],
                start_new_session=True,
            )
        try:
            shell = _Shell(process, pipe)
            if shell.wait(START_SECONDS) is None:
                raise CannotGoOn(f"no cell could run: IPython did not start. {_DOCTOR}")
            yield shell
        finally:
            # macOS: PermissionError if all processes of the group are zombies
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


_DOCTOR = "`course doctor` examines this machine"


def _ended(status: int) -> str:
    end = f"with status {status}" if status >= 0 else f"by signal {-status}"
    return (
        f"the process that ran your cells ended {end}. Does a cell call exit, or did memory run "
        f"out? {_DOCTOR}"
    )
