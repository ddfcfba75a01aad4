"""The parent's side of the fork server: start it, fork ranks from it, end them.

In a notebook it starts as soon as `course_lib.ranks` is imported. It loads PyTorch while the
notebook does, is ready when the first ranks are made, and ends with the kernel. Elsewhere, in
scripts and tests, nothing is started before it is needed.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from course_lib.ranks.sockets import JsonLines
from course_lib.ranks.stopping import uninterrupted

_UNREADABLE = "the process that starts the ranks sent an unreadable answer. Run the call again"
_MAX_LINE = 1 << 16

NARROW = ("torch", "torch.distributed", "cloudpickle", "course_lib.ranks.processes.worker")
"""Modules that a rank needs in any case."""

SOON = (
    "torch.fx.experimental.symbolic_shapes",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "torch.nn.parallel.distributed",
    "torch.optim.adamw",
    "torch.distributed.device_mesh",
)
"""Modules that a rank would otherwise import in its first training step, for seconds. They stand in
an order in which each takes its part of that time."""

WIDE = (*NARROW, *SOON)

LATER = (
    "matplotlib.pyplot",
    "matplotlib.backends.backend_agg",
    "IPython.core.interactiveshell",
)
"""Modules that few ranks need: not worth waiting for at the first start."""


class ForkServerError(RuntimeError):
    """The fork server could not be started, or it ended."""


class Process(Protocol):
    """The process that `ForkServer` talks to; `subprocess.Popen` is one."""

    def poll(self) -> int | None:
        """Return the exit status, ``None`` while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; raise `subprocess.TimeoutExpired`."""

    def kill(self) -> None:
        """End it, and its children."""


class ForkServer:
    """A running fork server.

    Args:
        start: starts the process, for example in a sandbox; it is given the number of the socket
            that the process must inherit. Default: this Python, with the modules of `NARROW`, soon
            those of `SOON`, and later those of `LATER`.
        start_timeout: seconds to wait until it is ready.
        wait: whether to wait for that here; else the first `fork` does.

    Raises:
        ForkServerError: it did not become ready.

    """

    def __init__(
        self,
        start: Callable[[int], Process] | None = None,
        start_timeout: float = 120,
        wait: bool = True,
    ) -> None:
        self._lock = threading.RLock()
        self._came: deque[dict[str, Any]] = deque()
        self._alive: set[int] = set()
        self._exits: dict[int, int] = {}
        self._loaded: set[str] = set()
        self._pings = 0
        self._owner = os.getpid()
        ours, theirs = socket.socketpair()
        self.socket = ours
        self._lines = JsonLines(ours, _MAX_LINE)
        self._news = select.poll()
        self._news.register(ours, select.POLLIN)
        with theirs:
            self.process = (start or _launch)(theirs.fileno())
        atexit.register(self.close)
        self._ready_until: float | None = time.monotonic() + start_timeout
        if wait:
            self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Wait until it has loaded what it loads; raise `ForkServerError` if it does not."""
        with self._lock:
            if self._ready_until is None:
                return
            try:
                self._wait_line("ready", max(self._ready_until, time.monotonic() + 60))
            except KeyboardInterrupt:
                raise  # it goes on loading: the next call finds it further
            except BaseException:
                self.process.kill()  # it has no children yet, and imports for seconds more
                self.close()
                raise
            self._ready_until = None

    def load(self, names: Iterable[str]) -> None:
        """Have it import these modules before it forks again, if it has not done so yet."""
        with self._lock, uninterrupted():
            if new := [name for name in names if name not in self._loaded]:
                self._loaded.update(new)
                with suppress(OSError):  # it has ended: the next `fork` says so
                    self._lines.send({"load": new})

    def fork(
        self, function: str, config: dict[str, Any], fds: Sequence[int], early: bool = False
    ) -> int:
        """Fork a child that runs ``module:function`` with `fds` and `config`; return its pid.

        If it is `early`, it does not wait for the modules `SOON`, and imports what it needs itself.
        """
        request = {"fork": function, "config": config, "fds": len(fds), "early": early}
        self.wait_until_ready()
        # An interrupt between the request and its answer would lose the child's pid.
        with self._lock, uninterrupted():
            try:
                self._lines.send(request, fds)
            except OSError as error:
                raise ForkServerError(
                    "the process that starts the ranks has ended. Run the call again: it starts "
                    "a new process"
                ) from error
            pid = int(self._wait_line("pid", time.monotonic() + 30)["pid"])
            self._alive.add(pid)
            self._exits.pop(pid, None)  # of an earlier process with this number
            return pid

    def signal(self, pids: Sequence[int], number: int) -> None:
        """Send a signal to those of these children that live."""
        request = {"signal": number, "pids": list(pids)}
        with self._lock, suppress(OSError):
            self._lines.send(request)

    def kill(self, pids: Sequence[int]) -> None:
        """End these children with SIGKILL and wait until they are gone."""
        with self._lock, uninterrupted():
            alive = [pid for pid in pids if self.exit_status(pid) is None]
            if not alive or self.process.poll() is not None:
                return
            self.signal(alive, signal.SIGKILL)
            try:
                deadline = time.monotonic() + 10
                while any(pid not in self._exits for pid in alive):
                    self._read(deadline)
            except (OSError, ForkServerError):
                self.close()  # takes its children with it

    def exit_status(self, pid: int, wait: float = 0.0) -> int | None:
        """Return the child's exit status (negative: the signal), ``None`` while it lives.

        `wait` seconds are given to a child that is just ending.
        """
        deadline = time.monotonic() + wait
        with self._lock:
            try:
                while pid not in self._exits:
                    self._read(deadline)
            except (OSError, ForkServerError):
                pass
            return self._exits.get(pid)

    def running(self, pids: Iterable[int], timeout: float) -> list[int] | None:
        """Ask the server which of these children have not begun to end (Linux).

        Returns:
            Their pids; ``None`` if the server does not answer within `timeout` seconds, because it
            has ended or is not run.

        """
        with self._lock:
            self._pings += 1
            request = {"ping": self._pings, "of": list(pids)}
            deadline = time.monotonic() + timeout
            try:
                self._lines.send(request)
                while (answer := self._wait_line("pong", deadline))["pong"] != self._pings:
                    pass  # of an earlier ping, for whose answer nobody waits any longer
                return [int(pid) for pid in answer["running"]]
            except (OSError, ForkServerError):
                return None

    def all_live(self, pids: Iterable[int]) -> bool:
        """Return whether the server and all these children live, as far as is known by now."""
        if self._owner != os.getpid():
            return False
        # Before every call, so quickly: a server that has ended can be read from, too.
        if self._news.poll(0) or self._came:
            with self._lock, suppress(OSError, ForkServerError):
                while True:  # until nothing more has come
                    self._read(0.0)
            if not self.alive():
                return False
        return self._exits.keys().isdisjoint(pids)

    def alive(self) -> bool:
        """Return whether the server runs and belongs to this process."""
        return self._owner == os.getpid() and self.process.poll() is None

    def close(self) -> None:
        """End the server and all its children."""
        atexit.unregister(self.close)
        self.socket.close()
        if self._owner != os.getpid():
            return  # a fork of our process holds a copy of the socket, but not the server
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _wait_line(self, key: str, deadline: float) -> dict[str, Any]:
        while True:
            line = self._read(deadline)
            if key in line:
                return line

    def _read(self, deadline: float) -> dict[str, Any]:
        while not self._came:
            # A deadline in the past means "what is there already".
            if self.socket.fileno() < 0:
                raise ForkServerError("the process that starts the ranks was closed")
            patience = max(0.0, deadline - time.monotonic())
            if not select.select([self.socket], [], [], patience)[0]:
                raise ForkServerError(
                    "the process that starts the ranks did not answer in time. Try again; if it "
                    "happens again, restart the kernel"
                )
            try:
                there = self._lines.read()
                self._came.extend(message for message, _ in self._lines.take())
            except ConnectionError:  # it ended before it had read all that was asked
                there = False
            except ValueError:
                raise ForkServerError(_UNREADABLE) from None
            if not there:
                raise ForkServerError(
                    f"the process that starts the ranks ended with status {self.process.wait(10)}. "
                    "Its output, if any, is above, or in the terminal where Jupyter was "
                    "started. Run the call again: it starts a new process"
                )
        message = self._came.popleft()
        try:
            if "exit" in message and message["exit"] in self._alive:
                self._alive.discard(message["exit"])
                self._exits[message["exit"]] = int(message["status"])
        except (ValueError, TypeError, KeyError):
            raise ForkServerError(_UNREADABLE) from None
        return message


_preloaded: dict[str, None] = {}


def preload(names: Iterable[str]) -> None:
    """Have ranks start with these modules loaded, which else each of them imports by itself.

    As all that the fork server loads, they must start no thread and run no tensor operation.
    """
    _preloaded.update(dict.fromkeys(names))


_server: ForkServer | None = None
_server_lock = threading.Lock()


def shared_server() -> ForkServer:
    """Return this process's fork server; start it on first use, or if it has ended."""
    server = start_server()
    server.wait_until_ready()
    server.load(list(_preloaded))
    return server


def start_server() -> ForkServer:
    """Return this process's fork server, which may still be loading."""
    global _server
    with _server_lock:
        if _server is None or not _server.alive():
            _server = ForkServer(wait=False)
        return _server


def end_soon(pids: Iterable[int]) -> None:
    """Have ranks of this process end, and do not wait for it, as closing them then does."""
    if _server is not None and _server.alive():
        _server.signal(list(pids), signal.SIGKILL)


def _launch(fd: int) -> subprocess.Popen[bytes]:
    """Start the fork server, which inherits the socket `fd`."""
    return subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-m",
            "course_lib.ranks.processes.fork_server",
            str(fd),
            *NARROW,
            "--",
            *SOON,
            "--",
            *LATER,
        ],
        pass_fds=[fd],
        stdin=subprocess.DEVNULL,
        env=_environment(),
        start_new_session=True,  # an interrupt at the terminal is ours to handle
    )


def _environment() -> dict[str, str]:
    loopback = "lo" if sys.platform == "linux" else "lo0"
    return {
        **os.environ,
        # One thread after the imports, or the fork would lose the others.
        "OPENBLAS_NUM_THREADS": "1",
        # Ranks of one machine need no host name that resolves.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", loopback),
        "PYTHONUNBUFFERED": "1",
        # Nobody reads PyTorch's flight recorder here, which keeps the stack of every operation.
        "TORCH_FR_BUFFER_SIZE": os.environ.get("TORCH_FR_BUFFER_SIZE", "0"),
        "MPLBACKEND": "agg",
    }


def start_in_notebook() -> None:
    """Start the fork server, if this is the kernel of a notebook."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if hasattr(ipython, "get_ipython") else None
    if getattr(shell, "kernel", None) is not None:
        with suppress(OSError, ForkServerError):  # then the first call says why
            start_server()
