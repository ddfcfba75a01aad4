"""Where student code runs: a sandbox that holds Python, the course's package and the checks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from autograder.sandbox.bubblewrap import Limits, Sandbox
from autograder.sandbox.mounts import Mount, python_mounts
from course_lib.ranks.processes.fork_client import ForkServer

_ENVIRONMENT = {
    "PYTHONPATH": "/exam",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",  # one thread, or the fork would lose the others
    "MPLBACKEND": "agg",
}


class SandboxedPlace:
    """The sandboxes of one submission: one at a time, a new one when student code ended the last.

    Args:
        checks: the assignment's public ``checks.py``; nothing else of the assignment is visible.
        masked: modules of course_lib that hold the answers and may not be imported.
        limits: bounds of memory, processes and files; default: those of `Limits`.

    """

    scratch = "/tmp"
    checks = "/exam/checks.py"

    def __init__(
        self, checks: Path, masked: Sequence[str] = (), limits: Limits | None = None
    ) -> None:
        examinee = Path(__file__).parents[1] / "inside" / "examinee.py"
        self._mounts = python_mounts(
            masked,
            [
                Mount("/exam/examinee.py", examinee),
                Mount(self.checks, checks),
            ],
        )
        self._limits = limits
        self._sandbox: Sandbox | None = None

    def start(self) -> ForkServer:
        """Start the examinee in a fresh sandbox and return the line to it."""
        self.close()
        return ForkServer(self._launch, start_timeout=60)

    def _launch(self, fd: int) -> _SandboxProcess:
        self._sandbox = Sandbox(
            [sys.executable, "-P", "/exam/examinee.py", str(fd)],
            mounts=self._mounts,
            env=_ENVIRONMENT,
            limits=self._limits,
            pass_fds=[fd],
        )
        return _SandboxProcess(self._sandbox)

    def close(self) -> None:
        """End the sandbox and everything in it."""
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None

    def __enter__(self) -> SandboxedPlace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
