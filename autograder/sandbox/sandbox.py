"""Run student code in a sandbox with Python and the course, in a separate cell for each process.

The sandbox contains one process of ours, a fork server with torch loaded. The server runs no
student code, so it can serve one submission after the other, and only the first waits for its
start. It forks each student process into a separate cell (`inside.cell`). One cell cannot affect
another, and each new cell is like a new sandbox.

This module decides who caused the end of a process. **A student's code is blamed only for an end
that it can cause.** It can exit with any status, and it can crash. It cannot send itself SIGKILL,
because its process is number 1 of its pid namespace, so the kernel ignores that signal from inside.
If a process was killed from outside, the machine did it: `MachineFailure`. The same is true if
nobody saw the end of the process because the sandbox had ended before.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from autograder.errors import CommandFailed, SandboxUnavailable
from autograder.sandbox import memory
from autograder.sandbox.bubblewrap import HardLimits, SandboxedProcess
from autograder.sandbox.cores import Cores, cores_of
from autograder.sandbox.mounts import Mount, beside_packages, course_package, python_mounts
from autograder.sandbox.seccomp import seccomp_filter
from autograder.sandbox.user import is_root, own_uid
from course_lib.ranks.explain.failure import exit_reason
from course_lib.ranks.for_graders import ForkServer, ForkServerError
from course_lib.ranks.wire import receive

_EXAM = "/exam"
_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",  # a fork would lose additional threads
    "MPLBACKEND": "agg",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PIP_NO_INDEX": "1",  # otherwise `%pip install` would try the network for half a minute
}
_INSIDE = Path(__file__).parents[1] / "inside"
_START_SECONDS = 120.0
_END_SECONDS = 10.0
"""Seconds for a process to end after it closes its connection, and for the fork server's answer."""

STOPPED = -signal.SIGSYS
"""Exit status of a process that killed or stopped itself, or used a different ABI of the kernel."""
_CRASHES = (
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL),
    *(signal.SIGTRAP, signal.SIGABRT, signal.SIGSYS),
)
"""Signals that a program's own fault causes. They end even process 1 of a pid namespace."""


class MachineFailure(CommandFailed):
    """The machine or our own code failed. No student loses points, and grading is tried again."""


@dataclass
class Cell:
    """One student process, from fork to kill."""

    server: ForkServer
    pid: int
    _kept: contextlib.ExitStack

    def interrupt(self) -> None:
        """Send SIGINT to the process."""
        self.server.signal([self.pid], signal.SIGINT)

    def close(self) -> None:
        """End the process and everything that it started, and wait until all of it is gone."""
        self.server.kill([self.pid])
        self._kept.close()


class Sandbox:
    """The sandbox of one assignment.

    Args:
        masked: modules of course_lib that contain the answers and may not be imported.
        limits: limits of memory, processes and files of each cell, and of the memory of all cells
            together; by default those of `HardLimits`.
        mounts: additional mounts of its cells, such as GPUs.
        environment: additional variables of its cells.

    Attributes:
        passed: the test that the running sandbox has passed; ``None`` again when it is started.

    """

    def __init__(
        self,
        masked: Sequence[str] = (),
        limits: HardLimits | None = None,
        mounts: Sequence[Mount] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        inside = [
            Mount(f"{_EXAM}/autograder/__init__.py", text=""),
            Mount(f"{_EXAM}/autograder/inside", _INSIDE),  # the part that runs inside
        ]
        self._mounts = python_mounts(masked, [*inside, *_checking(), *mounts])
        self._environment = _ENVIRONMENT | dict(environment or {})
        self._limits = limits or HardLimits()
        self._kept = contextlib.ExitStack()
        self._process: SandboxedProcess | None = None
        self._server: ForkServer | None = None
        self._group: memory.MemoryGroup | None = None
        self._log: IO[bytes] | None = None
        self._ours = 0
        self._failure: MachineFailure | None = None
        self._over = ""
        self._times_over = self._killed = 0
        self.passed: object = None

    def cell(
        self,
        run: str,
        config: dict[str, Any],
        fds: Sequence[int],
        *,
        gpu: bool = False,
        locks: bool = False,
        own_ranks: bool = False,
    ) -> Cell:
        """Start a process that runs the function ``module:name`` in a new cell.

        `gpu` means that it uses CUDA, which reserves more addresses than any limit on them allows.
        `locks` means that it may lock files; see `seccomp_filter`. `own_ranks` means that it may
        have ranks of its own, which need TCP and many processes.

        Raises:
            MachineFailure: there is no sandbox to start it in.

        """
        if self._server is None:
            self._start()
        assert self._server is not None
        with contextlib.ExitStack() as resources:
            uid = resources.enter_context(own_uid())
            calls = seccomp_filter(locks=locks, tcp=own_ranks)
            limits = self._limits.of_a_cell(gpu, own_ranks)
            cell = {
                **{"run": run, "uid": uid, "root": is_root(), "seccomp": calls, "limits": limits},
                **{"tmp": self._limits.tmp, "shm": self._limits.shm, **config},
            }
            try:
                pid = self._server.fork("autograder.inside.cell:serve", cell, fds)
            except ForkServerError:
                raise self.broken("The sandbox has ended") from None
            return Cell(self._server, pid, resources.pop_all())

    def warm(self) -> None:
        """Start the sandbox, unless it runs. An error of an earlier sandbox is forgotten.

        Raises:
            MachineFailure: the sandbox does not start.

        """
        self._failure = None
        if self._server is None or self._server.running([], _END_SECONDS) is None:
            self.close()
            self._start()

    def _start(self) -> None:
        log = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `close`)
        self._log = self._kept.enter_context(log)
        try:
            self._server = ForkServer(self._launch, _START_SECONDS)
        except ForkServerError:
            raise self.broken("The sandbox did not start") from None
        assert self._process is not None
        below = memory.descendants(self._process.pid)
        # Every student process is a fork of our server, and shares what the server holds.
        self._ours = max((memory.held_memory(pid) for pid in below), default=0)
        self._group = memory.MemoryGroup.make(self._limits.memory, 4 * self._limits.processes)
        if self._group is not None:
            self._group.add([self._process.pid, *below])
            self._kept.callback(self._group.close)
        self.watch_memory()
        self.passed = None

    def make_ready(self) -> None:
        """Start the sandbox, and test from inside a cell that everything needed is there.

        A sandbox may start even if cells fail, or if a cell's user may not read Python, its
        packages or the course. If this were noticed later, it would look like a student's mistake.
        A sandbox that is not ready is closed.

        Raises:
            SandboxUnavailable: nothing can be graded here; the message says why, and what to do.

        """
        with contextlib.ExitStack() as unless_ready:
            unless_ready.callback(self.close)
            try:
                self.warm()
                problem = self._look_from_a_cell()
            except (MachineFailure, OSError) as error:
                first, *other_lines = str(error).splitlines() or [""]
                # The last line has the exception's own message.
                problem = " … ".join([first, *other_lines[-1:]])
            if problem:
                raise SandboxUnavailable(problem)
            unless_ready.pop_all()

    def _look_from_a_cell(self) -> str:
        ours, child_end = socket.socketpair()
        with ours:
            with child_end:
                cell = self.cell("autograder.inside.look:serve", {}, [child_end.fileno()])
            with contextlib.closing(cell):
                ours.settimeout(_START_SECONDS)
                try:
                    return str(receive(ours))  # trusted, because no student code has run here
                except (OSError, ValueError, EOFError):
                    raise self.broken("A cell of the sandbox did not start") from None

    def broken(self, summary: str) -> MachineFailure:
        """Return the error for a failed sandbox, with the sandbox's last output, and close it.

        The error is kept until `warm`. If a caller swallows it, `check_alive` raises it again.
        """
        output = ""
        if self._log is not None:
            self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 4000))
            output = self._log.read().decode(errors="replace").strip()
        self.close()
        self._failure = MachineFailure(
            f"{summary}. {f'The sandbox said: {output}' if output else 'The sandbox said nothing.'}"
        )
        return self._failure

    def why_ended(self, cell: Cell) -> str:
        """Return in words how a student process ended, after it closed its connection.

        Raises:
            MachineFailure: its code cannot have caused this end, or nobody knows how it ended.

        """
        status = cell.server.exit_status(cell.pid)
        until = time.monotonic() + _END_SECONDS
        while status is None:
            # A process that closed its end may still run, or its end is not reported yet.
            running = cell.server.running([cell.pid], _END_SECONDS)
            if running is None or time.monotonic() > until:
                raise self.broken("The sandbox does not answer: it has ended or is paused")
            if running:
                return "it closed its connection to the grader"
            status = cell.server.exit_status(cell.pid, wait=0.1)
        if over := self.over_memory():
            return over
        if status == STOPPED:
            return "it killed or stopped itself"
        if status < 0 and -status not in _CRASHES:
            self.make_sure()
            name = exit_reason(status).partition(" (")[0]
            raise self.broken(f"A student's process was ended from outside, by {name}")
        return exit_reason(status)

    def check_alive(self) -> None:
        """Make sure that the sandbox that `warm` started is still running.

        Raises:
            MachineFailure: it is not running.

        """
        if self._failure is not None:
            raise self._failure
        if self._server is not None and self._server.running([], _END_SECONDS) is None:
            raise self.broken("The sandbox does not answer: it has ended or is paused")

    def make_sure(self) -> None:
        """Make sure that the machine has caused no failure since `watch_memory`.

        Raises:
            MachineFailure: the sandbox has failed, has ended, or is stopped. Or the kernel has
                killed a process for lack of memory, but not at the submission's own limit.

        """
        self.check_alive()
        if memory.killed_for_memory() > self._killed and not self.over_memory():
            raise self.broken("This machine had no memory left and killed a process")

    def _launch(self, fd: int) -> SandboxedProcess:
        self._process = SandboxedProcess(
            [sys.executable, "-P", "-m", "autograder.inside.examinee", str(fd)],
            mounts=self._mounts,
            env=self._environment | {"PYTHONPATH": _path()},
            tmp=self._limits.tmp,
            log=self._log,
            pass_fds=[fd],
        )
        return self._process

    def cores(self) -> dict[int, Cores]:
        """Return the core times of the sandbox's processes, by pid.

        Our own process is included with its waiting time, because it carries the ranks' messages.
        """
        below = memory.descendants(self._process.pid) if self._process is not None else ()
        times, ours = cores_of([os.getpid(), *below]), os.getpid()
        if ours in times:
            times[ours] = Cores(0.0, times[ours].waited)
        return times

    def watch_memory(self) -> None:
        """Make `over_memory` and `make_sure` consider only events from now on."""
        self._over = ""
        self._times_over = 0 if self._group is None else self._group.times_over()
        self._killed = memory.killed_for_memory()

    def over_memory(self) -> str:
        """Return a message if the cells together used too much memory, or an empty string.

        After a first message, every call returns a message until `watch_memory`.
        """
        if self._over or self._process is None:
            return self._over
        if self._group is not None:
            over = self._group.times_over() > self._times_over
        else:
            below = memory.descendants(self._process.pid)
            held = sum(max(0, memory.held_memory(pid) - self._ours) for pid in below)
            over = held + memory.unmapped_memory(below) > self._limits.memory
            if over:
                held = sum(map(memory.exact_memory, below)) - self._ours
                over = held + memory.unmapped_memory(below, exact=True) > self._limits.memory
        limit = self._limits.memory / 2**30
        self._over = f"the submission's processes took more than {limit:g} GiB of memory" * over
        return self._over

    def close(self) -> None:
        """End the sandbox and everything in it."""
        if self._server is not None:
            self._server.socket.close()
        if self._process is not None:
            self._process.kill()
        if self._server is not None:
            self._server.close()
        self._kept.close()
        self._process = self._server = self._group = self._log = None

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _path() -> str:
    """Return Python's search path inside, which also includes a clone that is not installed."""
    package = course_package()
    return os.pathsep.join([_EXAM, *([str(package.parent)] if beside_packages(package) else [])])


def _checking() -> Iterator[Mount]:
    """Show only the ranks' part of `course_lib.checking`; judges and oracles stay outside.

    A student's cell may import `check` and call it. The call does nothing, because the grader
    itself runs the check.
    """
    folder = course_package() / "checking"
    yield Mount(folder)
    yield Mount(folder / "__init__.py", _INSIDE / "no_checking.py")
    yield Mount(folder / "on_ranks", folder / "on_ranks")
