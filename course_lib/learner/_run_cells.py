"""Run cells and checks in a new kernel, by nbclient, and show their output in the terminal.

nbclient starts the kernel, notices its death, and ends it. Added here are limits of time that do
not run while the kernel waits for a core, and an end for cells that cannot be interrupted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import run_sync
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError
from nbformat import NotebookNode, v4

from course_lib.learner import CannotGoOn, _in_kernel
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
"""Seconds between two looks at the kernel's clock."""
START_SECONDS = 300
_NOT_STARTED = (
    "the kernel that runs your cells did not start. `course doctor` examines this machine"
)


@dataclass(frozen=True)
class Step:
    """A cell that is run.

    Attributes:
        number: its place among the code cells.
        source: its text.
        kind: the kind of cells with which it shares its time: a name of `course_lib.limits`.
        check: the name of its check; empty if it is none. A check has its own limits.

    """

    number: int
    source: str
    kind: str = OTHERS
    check: str = ""


def run_steps(steps: list[Step], folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Run the steps in a new kernel; return the outcome of each check, and notes.

    A cell that lasts longer than its limit is interrupted. If it does not end, its kernel is
    killed, and a new one runs the other cells and the checks that are left.

    Raises:
        CannotGoOn: the kernel did not start, or has ended by itself.

    """
    results = _Results()
    while True:
        with _kernel(folder) as kernel:
            stuck = next((step for step in steps if not results.add(step, kernel)), None)
        if stuck is None:
            return results.checks, results.notes
        results.note(f"cell {stuck.number} could not be interrupted, so it was left out")
        steps = [s for s in steps if s is not stuck and s.check not in results.checks]


class _Results:
    """The outcome of each check, notes on cells, and the time that is left for cells."""

    def __init__(self) -> None:
        self.checks: dict[str, Any] = {}
        self.notes: list[str] = []
        self._left = {SOLUTIONS: CELLS_SECONDS, OTHERS: CELLS_SECONDS}
        self._failures: list[tuple[str, str]] = []  # the source of a cell, and why it failed

    def note(self, text: str) -> None:
        """Add a note, once: a second kernel repeats the cells of the first."""
        self.notes += [text] if text not in self.notes else []

    def add(self, step: Step, kernel: _Kernel) -> bool:
        """Run a step and keep what it gives; return False if its cell could not be interrupted."""
        limit = None if step.check else limit_of(step.kind, self._left[step.kind])
        outcome = {"seconds": 0.0} if limit == 0 else kernel.run(step, limit)
        error = self._explained(outcome)
        if step.check:
            reason = error or "the cell of this check does not call check any more"
            self.checks[step.check] = {"fraction": 0.0, "reason": reason} | outcome
            print(flush=True)
            return True
        self._left[step.kind] -= outcome["seconds"]
        if outcome.get("is_stuck"):
            return False
        failure = f"cell {step.number} failed: {error}"
        if error:
            self._failures.append((step.source, failure))
        if limit is not None and outcome["seconds"] >= limit:
            self.note(_late(step, outcome["seconds"]))
        elif error:
            self.note(failure)
        return True

    def _explained(self, outcome: dict[str, Any]) -> str:
        """Return the error of a cell; of a missing name, why the first cell with it failed."""
        if name := outcome.get("missing"):
            for source, failure in self._failures:
                if re.search(rf"\b{re.escape(name)}\b", source):
                    return f"there is no {name}, because {failure}"
        return str(outcome.get("error", ""))


def _late(step: Step, seconds: float) -> str:
    """Return the note on a cell that has used up its time, or the time of its kind of cells."""
    event = f"interrupted after {seconds:.0f} s" if seconds else "not run"
    advice = "" if step.kind == SOLUTIONS else "; a cell with the tag explore is not run"
    return (
        f"cell {step.number} was {event}: as in the grader, a cell has {CELL_SECONDS:g} s, and "
        f"all {step.kind} together have {CELLS_SECONDS:g} s{advice}"
    )


class _Kernel(NotebookClient):
    """A kernel whose cells print to this process's terminal."""

    _has_line = False

    def run(self, step: Step, limit: float | None) -> dict[str, Any]:
        """Run a cell; return its outcome, its ``seconds``, and whether it ``is_stuck``.

        Raises:
            CannotGoOn: it has ended the kernel.

        """
        assert self.km is not None and self.kc is not None
        provisioner: Any = self.km.provisioner
        pid = provisioner.pid
        # Tracebacks say: Cell In[…].
        self.kc.execute(f"get_ipython().execution_count = {step.number}", silent=True)
        cell = v4.new_code_cell(step.source)
        self.nb.cells = [cell]
        self._outcome: dict[str, Any] | None = None
        self._displays: dict[str, str] = {}  # by id: displays that change until the cell ends
        start, killed = clock_of(pid), threading.Event()
        try:
            with _limited(pid, limit, killed):
                self.execute_cell(cell, 0)
        except DeadKernelError as error:
            if killed.is_set():
                return {"seconds": limit, "is_stuck": True}
            raise CannotGoOn(_ended(provisioner.process.returncode)) from error
        finally:
            for text in filter(None, self._displays.values()):
                self._print(f"{text}\n")
            self._clear_line()
        if self._outcome is None:
            raise CannotGoOn(_NOT_STARTED)
        return {**self._outcome, "seconds": clock_of(pid) - start}

    def process_message(self, msg: dict[str, Any], cell: NotebookNode, cell_index: int) -> None:
        """Show an output, and do not keep it."""
        content = msg["content"]
        data = content.get("data", {})
        if msg["msg_type"] == "stream":
            self._print(content["text"], content["name"])
        elif msg["msg_type"] == "error":
            self._print("\n".join([*content["traceback"], ""]))
        elif _in_kernel.OUTCOME in data:
            self._outcome = data[_in_kernel.OUTCOME]
        elif name := (content.get("transient") or {}).get("display_id"):
            self._displays[name] = data.get("text/plain", "")
            if sys.stderr.isatty():
                room = shutil.get_terminal_size().columns - 1
                line = self._displays[name].partition("\n")[0][:room]
                print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
                self._has_line = True
        elif "text/plain" in data:
            self._print(f"{data['text/plain']}\n")
        elif msg["msg_type"] == "status":
            super().process_message(msg, cell, cell_index)

    def _print(self, text: str, stream: str = "stdout") -> None:
        self._clear_line()
        print(text, end="", file=getattr(sys, stream), flush=True)

    def _clear_line(self) -> None:
        if self._has_line:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        self._has_line = False


class _OurKernel(KernelSpecManager):
    """Knows one kernel, whatever kernels the user has installed."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        # -P: as in the grader, no file beside the notebook can be imported.
        command = [sys.executable, "-P", "-m", _in_kernel.__name__, "-f", "{connection_file}"]
        return KernelSpec(argv=command)


@contextlib.contextmanager
def _kernel(folder: Path) -> Iterator[_Kernel]:
    """Start a kernel in `folder`; at the end, end it with all that its cells have started."""
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(tempfile.TemporaryDirectory(prefix="course-check-"))
        manager = AsyncKernelManager(
            kernel_spec_manager=_OurKernel(), connection_file=os.path.join(home, "kernel.json")
        )
        kernel = _Kernel(
            v4.new_notebook(),
            manager,
            startup_timeout=START_SECONDS,
            iopub_timeout=START_SECONDS,  # outputs may come late on a busy machine
            record_timing=False,
            allow_errors=True,
        )
        # IPYTHONDIR: not the settings of the user's IPython.
        environment = os.environ | {"MPLBACKEND": "agg", "IPYTHONDIR": home}
        options = {"cwd": str(folder), "env": environment, "cleanup_kc": True}
        stack.callback(_kill_group, manager)
        try:
            stack.enter_context(kernel.setup_kernel(**options))
        except RuntimeError as error:
            raise CannotGoOn(f"{_NOT_STARTED}: {error}") from error
        stack.callback(run_sync(_cancel_tasks))
        assert kernel.kc is not None
        kernel.kc.allow_stdin = True  # or `Ranks` shows no progress, as if nobody were looking
        yield kernel


async def _cancel_tasks() -> None:
    """End what an interrupted cell has left in the loop, or it complains when its kernel ends."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _kill_group(manager: AsyncKernelManager) -> None:
    """Kill what the kernel's cells have started and left."""
    if pid := getattr(manager.provisioner, "pid", None):
        # macOS: PermissionError if all processes of the group are zombies
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


@contextlib.contextmanager
def _limited(pid: int, seconds: float | None, killed: threading.Event) -> Iterator[None]:
    """Interrupt a process after so many seconds, and kill it if it goes on for too long."""
    ended = threading.Event()

    def watch(seconds: float) -> None:
        for duration, signum in ((seconds, signal.SIGINT), (INTERRUPT_SECONDS, signal.SIGKILL)):
            end = clock_of(pid) + duration
            while (left := end - clock_of(pid)) > 0:
                if ended.wait(min(left, LOOK_EVERY)):
                    return
            if signum == signal.SIGKILL:
                killed.set()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    if seconds is not None:
        threading.Thread(target=watch, args=[seconds], daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _ended(status: int) -> str:
    end = f"with status {status}" if status >= 0 else f"by signal {-status}"
    return (
        f"the process that ran your cells ended {end}. Does a cell call exit, or did memory run "
        "out? `course doctor` examines this machine"
    )
