"""The parent's side of the fork server: start it, fork ranks from it, end them.

In a notebook the server starts as soon as `course_lib.ranks` is imported. It loads PyTorch at the
same time as the notebook, is ready when the first ranks are made, and ends with the kernel.
Elsewhere, in scripts and tests, it starts only when it is needed.
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

from course_lib.ranks import wire
from course_lib.ranks.output.printer import in_notebook
from course_lib.ranks.stopping import uninterrupted

_UNREADABLE = "the process that starts the ranks sent an unreadable answer. Run the call again"
_MAX_ANSWER = 1 << 16

NEEDED = (
    *("torch", "torch.distributed", "cloudpickle", "course_lib.ranks.processes.worker"),
    "torch.fx.experimental.symbolic_shapes",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "torch.nn.parallel.distributed",
    "torch.optim.adamw",
    "torch.distributed.device_mesh",
)
"""Modules that a rank needs in any case, and those that its first training step would otherwise
import, which would take seconds."""

LATER = ("matplotlib.pyplot", "matplotlib.backends.backend_agg", "IPython.core.interactiveshell")
"""Modules that few ranks need, so that the first start should not wait for them."""


TRIES_FORK = sys.platform == "darwin"
"""Whether to try first if a fork can compute: macOS ends a fork that uses some of its libraries."""
TRIAL = "course_lib.ranks.processes.gloo:try_fork"
"""What a fork must be able to do, as ``module:function``."""
_TRIAL_LIMIT = 20.0
"""Seconds for the trial: a fork may hang, too."""


class ForkServerError(RuntimeError):
    """The fork server could not be started, or it ended."""


class Process(Protocol):
    """The process that `ForkServer` talks to; `subprocess.Popen` is one."""

    def poll(self) -> int | None:
        """Return the exit status; ``None`` while the process runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; raise `subprocess.TimeoutExpired` if it does not come in time."""

    def kill(self) -> None:
        """End the process and its children."""


class ForkServer:
    """A running fork server.

    Args:
        start: starts the process, for example in a sandbox. Its argument is the number of the
            socket that the process must inherit. By default it starts this Python, which loads the
            modules of `NEEDED` first, and those of `LATER` when it has nothing to do.
        start_timeout: seconds to wait until the server is ready.
        wait: whether to wait for that here; else the first `fork` waits.

    Raises:
        ForkServerError: the server did not become ready.

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
        self._pings = 0
        self._spawns = False
        self._owner = os.getpid()
        client_end, server_end = socket.socketpair()
        self.socket = client_end
        self._reader = wire.Reader(_MAX_ANSWER)
        self._news = select.poll()
        self._news.register(client_end, select.POLLIN)
        with server_end:
            self.process = (start or _launch)(server_end.fileno())
        atexit.register(self.close)
        self._ready_until: float | None = time.monotonic() + start_timeout
        if wait:
            self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Wait until the server has loaded its modules; raise `ForkServerError` if it does not."""
        with self._lock:
            if self._ready_until is None:
                return
            try:
                self._wait_for("ready", max(self._ready_until, time.monotonic() + 60))
            except KeyboardInterrupt:
                raise  # the server goes on loading, so the next call waits less
            except BaseException:
                self.process.kill()  # it has no children yet, and would import for seconds more
                self.close()
                raise
            self._ready_until = None
            if TRIES_FORK:
                self._try_fork()

    def _try_fork(self) -> None:
        """Fork once; if that child does not end well, start later ones as new processes."""
        pid = self.fork(TRIAL, {}, [])
        if self.exit_status(pid, wait=_TRIAL_LIMIT) != 0:
            self.kill([pid])
            self._spawns = True
            print(
                "A forked process cannot compute on this machine. So each rank is started as a new "
                "Python, and the first call of new ranks takes some seconds longer.",
                file=sys.stderr,
            )

    def remove_at_end(self, folder: str) -> None:
        """Have the server remove a folder when it ends, also if this process is killed."""
        with self._lock, uninterrupted(), suppress(OSError):
            wire.send(self.socket, {"remove": folder})

    def load(self, names: Iterable[str]) -> None:
        """Have the server import those of these modules that are not loaded, before it forks."""
        with self._lock, uninterrupted(), suppress(OSError):  # the next `fork` reports its end
            wire.send(self.socket, {"load": list(names)})

    def fork(self, function: str, config: dict[str, Any], fds: Sequence[int]) -> int:
        """Fork a child that runs ``module:function`` with `fds` and `config`; return its pid."""
        self.wait_until_ready()
        spawn = {"spawn": True} if self._spawns else {}
        request = {"fork": function, "config": config, "fds": len(fds), **spawn}
        # An interrupt between the request and its answer would lose the child's pid.
        with self._lock, uninterrupted():
            try:
                wire.send(self.socket, request, fds)
            except OSError as error:
                raise ForkServerError(
                    "the process that starts the ranks has ended. Run the call again: it starts "
                    "a new process"
                ) from error
            pid = int(self._wait_for("pid", time.monotonic() + 30)["pid"])
            self._alive.add(pid)
            self._exits.pop(pid, None)  # drop the status of an earlier process with this pid
            return pid

    def signal(self, pids: Sequence[int], number: int) -> None:
        """Send a signal to the children in `pids` that are alive."""
        request = {"signal": int(number), "pids": list(pids)}
        with self._lock, suppress(OSError):
            wire.send(self.socket, request)

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
                self.close()  # this also ends the server's children

    def exit_status(self, pid: int, wait: float = 0.0) -> int | None:
        """Return the child's exit status (negative: the signal), ``None`` while it lives.

        It waits up to `wait` seconds for a child that is just ending.
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
            has ended or gets no processor time.

        """
        with self._lock:
            self._pings += 1
            request = {"ping": self._pings, "of": list(pids)}
            deadline = time.monotonic() + timeout
            try:
                wire.send(self.socket, request)
                while (answer := self._wait_for("pong", deadline))["pong"] != self._pings:
                    pass  # a late answer to an earlier ping, which is no longer needed
                return [int(pid) for pid in answer["running"]]
            except (OSError, ForkServerError):
                return None

    def all_live(self, pids: Iterable[int]) -> bool:
        """Return whether the server and all these children live, as far as is known by now."""
        if self._owner != os.getpid():
            return False
        # This runs before every call, so it must be quick. The socket is readable, too, if the
        # server has ended.
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
            return  # this is a fork of the owner: it has a copy of the socket, but no server
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _wait_for(self, key: str, deadline: float) -> dict[str, Any]:
        while True:
            answer = self._read(deadline)
            if key in answer:
                return answer

    def _read(self, deadline: float) -> dict[str, Any]:
        while not self._came:
            # With a deadline in the past, only what has already arrived is read.
            if self.socket.fileno() < 0:
                raise ForkServerError("the process that starts the ranks was closed")
            patience = max(0.0, deadline - time.monotonic())
            if not self._news.poll(1000 * patience):
                raise ForkServerError(
                    "the process that starts the ranks did not answer in time. Try again; if it "
                    "happens again, restart the kernel"
                )
            try:
                piece = self.socket.recv(wire.PIECE)
                self._came.extend(self._reader.feed(piece))
            except ConnectionError:  # the server ended before it had read all requests
                piece = b""
            except ValueError:
                raise ForkServerError(_UNREADABLE) from None
            if not piece:
                raise ForkServerError(
                    f"the process that starts the ranks ended with status {self.process.wait(10)}. "
                    "Its output, if any, is above, or in the terminal where Jupyter was "
                    "started. Run the call again: it starts a new process"
                )
        message = self._came.popleft()
        try:
            if not isinstance(message, dict):
                raise TypeError("no message")
            if "exit" in message and message["exit"] in self._alive:
                self._alive.discard(message["exit"])
                self._exits[message["exit"]] = int(message["status"])
        except (ValueError, TypeError, KeyError):
            raise ForkServerError(_UNREADABLE) from None
        return message


_preloaded: dict[str, None] = {}


def preload(names: Iterable[str]) -> None:
    """Have the fork server load these modules, so that ranks need not import them one by one.

    Like everything that the fork server loads, they must start no thread and run no tensor
    operation.
    """
    _preloaded.update(dict.fromkeys(names))


_server: ForkServer | None = None
_server_lock = threading.Lock()


def shared_server() -> ForkServer:
    """Return this process's fork server; start it on first use, and again if it has ended."""
    server = start_server()
    server.wait_until_ready()
    server.load(_preloaded)
    return server


def start_server() -> ForkServer:
    """Return this process's fork server, which may still be loading."""
    global _server
    with _server_lock:
        if _server is None or not _server.alive():
            _server = ForkServer(wait=False)
        return _server


def end_soon(pids: Iterable[int]) -> None:
    """Tell ranks of this process to end, without waiting for it; closing them waits later."""
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
            *NEEDED,
            "--",
            *LATER,
        ],
        pass_fds=[fd],
        stdin=subprocess.DEVNULL,
        env=_environment(),
        start_new_session=True,  # only this process handles an interrupt at the terminal
    )


def _environment() -> dict[str, str]:
    loopback = "lo" if sys.platform == "linux" else "lo0"
    return {
        **os.environ,
        # The imports must start no further threads: a fork would lose them.
        "OPENBLAS_NUM_THREADS": "1",
        "VECLIB_MAXIMUM_THREADS": "1",  # of Accelerate, macOS's BLAS
        # Otherwise macOS ends a fork that is the first to use an Objective-C class.
        "OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES",
        # On one machine, gloo can use loopback and needs no host name that resolves.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME") or loopback,
        "PYTHONUNBUFFERED": "1",
        # PyTorch's flight recorder keeps the stack of every operation, and is not used here.
        "TORCH_FR_BUFFER_SIZE": os.environ.get("TORCH_FR_BUFFER_SIZE", "0"),
        "MPLBACKEND": "agg",
    }


def start_in_notebook() -> None:
    """Start the fork server, if this is the kernel of a notebook."""
    if in_notebook():
        with suppress(OSError, ForkServerError):  # the first call will report the reason
            start_server()
