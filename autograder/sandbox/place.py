"""Where student code runs: a sandbox with Python and the course, and in it a cell per process.

The sandbox holds one process of ours, a fork server with torch loaded. It runs no student's code,
so it serves one submission after the other, and is warm for all but the first. Each process of a
student's is forked from it into a cell of its own (`inside.cell`): what happens in one touches no
other, and a new cell is a fresh sandbox.
"""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from autograder.sandbox.bubblewrap import Limits, Sandbox
from autograder.sandbox.cores import Cores, cores_of, own_wait
from autograder.sandbox.memory import (
    MemoryGroup,
    available_memory,
    descendants,
    private_memory,
)
from autograder.sandbox.mounts import Mount, beside_packages, course_package, python_mounts
from autograder.sandbox.seccomp import seccomp_filter
from autograder.sandbox.user import is_root, own_uid
from course_lib.ranks.processes.fork_client import ForkServer, ForkServerError

_EXAM = "/exam"
_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",  # one thread, or the fork would lose the others
    "MPLBACKEND": "agg",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PIP_NO_INDEX": "1",  # else `%pip install` would look for a network for half a minute
}
_INSIDE = Path(__file__).parents[1] / "inside"
_START_SECONDS = 120.0
OVER_MEMORY = "submission's processes took more than"
STOPPED = -signal.SIGSYS
"""Exit status of a process that killed or stopped itself, or called the kernel in another ABI."""


@dataclass
class Cell:
    """One process of a student's, from fork to kill. A context manager."""

    server: ForkServer
    pid: int
    _kept: contextlib.ExitStack

    def status(self, wait: float = 0.0) -> int | None:
        """Return its exit status (negative: the signal), None while it runs."""
        return self.server.exit_status(self.pid, wait)

    def close(self) -> None:
        """End it and everything that it started, and wait until all of that is gone."""
        self.server.kill([self.pid])
        self._kept.close()

    def __enter__(self) -> Cell:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SandboxedPlace:
    """The sandbox of one assignment.

    Args:
        masked: modules of course_lib that hold the answers and may not be imported.
        limits: bounds of memory, processes and files of each cell, and of the memory of all
            together; default: those of `Limits`.
        more: what its cells see besides, such as GPUs.

    Attributes:
        generation: how often its sandbox was started: another number is another sandbox.

    """

    def __init__(
        self,
        masked: Sequence[str] = (),
        limits: Limits | None = None,
        more: Sequence[Mount] = (),
    ) -> None:
        inside = [
            Mount(
                f"{_EXAM}/autograder/__init__.py", text=""
            ),  # of the autograder, what runs inside
            Mount(f"{_EXAM}/autograder/inside", _INSIDE),
        ]
        self._mounts = python_mounts(masked, [*inside, *_checking(), *more])
        self._limits = limits or Limits()
        self._kept = contextlib.ExitStack()
        self._sandbox: Sandbox | None = None
        self._server: ForkServer | None = None
        self._group: MemoryGroup | None = None
        self._log: IO[bytes] | None = None
        self._ours = 0
        self._kills = 0
        self._most_free = 0
        self.generation = 0

    def cell(
        self, run: str, config: dict[str, Any], fds: Sequence[int], *, gpu: bool = False
    ) -> Cell:
        """Start a process in a cell of its own; it runs the function ``module:name``.

        `gpu`: it uses CUDA, which reserves more addresses than any limit on them leaves.

        Raises:
            ForkServerError: the sandbox could not be started, twice in a row.

        """
        for attempt in (1, 2):
            server = self._running()
            with contextlib.ExitStack() as kept:
                uid = kept.enter_context(own_uid())
                cell = {"run": run, "uid": uid, **self._given, **config}
                if gpu:
                    cell["limits"] = {k: v for k, v in cell["limits"].items() if k != "as"}
                try:
                    pid = server.fork("autograder.inside.cell:serve", cell, fds)
                except ForkServerError:
                    error = self.broken("the sandbox has ended")
                    if attempt == 2:
                        raise error from None
                    continue
                return Cell(server, pid, kept.pop_all())
        raise AssertionError  # the second attempt has returned or raised

    def kill(self, cells: Sequence[Cell]) -> None:
        """End these cells, all at once."""
        if cells:
            cells[0].server.kill([cell.pid for cell in cells])
        for cell in cells:
            cell.close()

    @property
    def _given(self) -> dict[str, Any]:
        return {
            "root": is_root(),
            "limits": self._limits.of_a_cell(),
            "tmp": self._limits.tmp,
            "shm": self._limits.shm,
            "seccomp": base64.b64encode(seccomp_filter()).decode(),
        }

    def warm(self) -> None:
        """Start the sandbox, unless it runs."""
        self._running()

    def _running(self) -> ForkServer:
        if self._server is None or not self._server.alive():
            self.close()
            self._start()
        assert self._server is not None
        return self._server

    def _start(self) -> None:
        log = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `close`)
        self._log = self._kept.enter_context(log)
        try:
            self._server = ForkServer(self._launch, _START_SECONDS)
        except ForkServerError:
            raise self.broken("the sandbox did not start") from None
        assert self._sandbox is not None
        below = descendants(self._sandbox.pid)
        self._ours = max((private_memory(pid) for pid in below), default=0)
        self._most_free = available_memory()
        self._group = MemoryGroup.make(self._limits.memory, 4 * self._limits.processes)
        if self._group is not None:
            self._group.add([self._sandbox.pid, *below])
            self._kept.callback(self._group.close)
            self._kills = 0
        self.generation += 1

    def broken(self, what: str) -> ForkServerError:
        """Return the error for a sandbox that failed, with its own words; the next is a new one."""
        said = ""
        if self._log is not None:
            self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 4000))
            said = self._log.read().decode(errors="replace").strip()
        self.close()
        return ForkServerError(f"{what}. {f'It said: {said}' if said else 'It said nothing.'}")

    def _launch(self, fd: int) -> _SandboxProcess:
        self._sandbox = Sandbox(
            [sys.executable, "-P", "-m", "autograder.inside.examinee", str(fd)],
            mounts=self._mounts,
            env=_ENVIRONMENT | {"PYTHONPATH": _path()},
            limits=self._limits,
            stderr=self._log,
            pass_fds=[fd],
            cells=True,
        )
        return _SandboxProcess(self._sandbox)

    def cores(self) -> dict[int, Cores]:
        """Return what the sandbox's processes have had of the cores, by pid.

        Our own process is among them, with its wait: it carries what the ranks send.
        """
        below = descendants(self._sandbox.pid) if self._sandbox is not None else ()
        return {os.getpid(): Cores(0.0, own_wait()), **cores_of(below)}

    def over_memory(self) -> str:
        """Return in words that the cells have taken too much memory together, or nothing."""
        if self._sandbox is None:
            return ""
        if self._group is not None:
            kills, before = self._group.kills(), self._kills
            self._kills = kills
            over = kills > before
        else:
            # Looking at every process takes long: only once memory has gone to somebody.
            now = available_memory()
            self._most_free = max(self._most_free, now)
            if self._most_free - now < self._limits.memory / 2 and now:
                return ""
            below = descendants(self._sandbox.pid)
            own = (private_memory(pid) - self._ours for pid in below)
            over = sum(bytes_ for bytes_ in own if bytes_ > 0) > self._limits.memory
        limit = self._limits.memory / 2**30
        return f"the {OVER_MEMORY} {limit:g} GiB of memory" * over

    def close(self) -> None:
        """End the sandbox and everything in it."""
        if self._server is not None:
            self._server.socket.close()
        if self._sandbox is not None:
            self._sandbox.close()
        if self._server is not None:
            self._server.close()
        self._kept.close()
        self._sandbox = self._server = self._group = self._log = None

    def __enter__(self) -> SandboxedPlace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _path() -> str:
    """Return where Python looks inside; a clone that is not the installed one is found as well."""
    package = course_package()
    return os.pathsep.join([_EXAM, *([str(package.parent)] if beside_packages(package) else [])])


def _checking() -> Iterator[Mount]:
    """Of `course_lib.checking`, show the rank's side; judges and oracles stay outside.

    A student's cell may import `check` and call it: it says that the grader does that.
    """
    folder = course_package() / "checking"
    yield Mount(folder)
    yield Mount(folder / "__init__.py", _INSIDE / "no_checking.py")
    for name in ("wire.py", "frames.py", "effects.py", "held.py", "given.py"):
        yield Mount(folder / name, folder / name)


class _SandboxProcess:
    """A sandbox as the process that `ForkServer` talks to."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def poll(self) -> int | None:
        return self._sandbox.poll()

    def wait(self, timeout: float | None = None) -> int:
        return self._sandbox.wait(60.0 if timeout is None else timeout)

    def kill(self) -> None:
        self._sandbox.close()
