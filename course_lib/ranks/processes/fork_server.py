"""The process that ranks are forked from: Python with torch loaded, and nothing started.

A fresh Python needs seconds to import torch; a fork of this process needs milliseconds. It is safe
to fork because it has one thread, has run no tensor operation (that would start OpenMP's threads,
which a fork loses) and has not touched CUDA (a context cannot be forked).

It runs no code but this file. Its parent talks to it over a socket, in lines of JSON:

                                                               ← {"ready": 100}
    → {"fork": "module:function", "config": {…}, "fds": 3}  with 3 descriptors     ← {"pid": 123}
      or, not to wait until the modules are there that a rank needs soon: {…, "early": true}
    → {"signal": 9, "pids": [123, …]}
    → {"load": ["module", …]}
    → {"ping": 7, "of": [123, …]}                ← {"pong": 7, "running": [123]}
                                                               ← {"exit": 123, "status": -9}

When the socket closes, whatever ended the parent, all ranks and this process end. A rank that is
killed cannot clean up after itself; so its semaphores and shared memory, such as those of spawned
DataLoader workers, are noted by a process that outlives all ranks, and removed by it in the end.
Start: ``python -P -m course_lib.ranks.processes.fork_server FD MODULE… [-- MODULE… [-- MODULE…]]``:
FD is the socket; the modules to load before any fork; those to load soon, before a fork that is not
early; and those to load later, whenever nothing is asked for a second.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import select
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import resource_tracker
from typing import Any, NoReturn

from course_lib.ranks.sockets import JsonLines

_MAX_LINE = 1 << 20
_MADV_COLLAPSE = 25
_HUGE = 2 << 20
_MOMENT = 0.05
"""Seconds without a request after which what is needed soon is loaded."""
_IDLE = 1.0
"""Seconds without a request after which the rest is loaded; and also that, if a fork was early."""


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process when process `parent` ends (Linux; elsewhere a no-op).

    In a pid namespace of its own its parent has no number, and seems to be 0: with the namespace
    above, where the parent lives, it ends anyway.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() not in (parent, 0):  # it ended before we asked
            os._exit(1)


def serve(
    control: socket.socket,
    soon: Sequence[str] = (),
    later: Sequence[str] = (),
    fork_process: Callable[[], int] = os.fork,
    gathers: bool = False,
) -> None:
    """Answer requests on `control` until it closes; then end every child.

    The modules `soon` are loaded one by one, with a look for requests in between, but before any
    fork that is not early; the modules `later`, each after `_IDLE` seconds without a request. If it
    `gathers`, memory is gathered in huge pages after that, as soon as no child shares it.
    `fork_process` forks as `os.fork` does.
    """
    needed, waiting = list(soon), list(later)
    pause = _MOMENT
    children: set[int] = set()
    lines = JsonLines(control, _MAX_LINE, takes_fds=True)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    os.set_blocking(wake_read, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    selector.register(wake_read, selectors.EVENT_READ)

    def fork(request: dict[str, Any], fds: list[int]) -> None:
        nonlocal pause
        # An early child may need the processor now, and be followed by others that do not wait.
        pause = _IDLE
        while needed and not request.get("early"):
            _load_ahead(needed.pop(0))
        server = os.getpid()
        pid = fork_process()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            selector.close()
            control.close()
            os.close(wake_read)
            os.close(wake_write)
            _run_child(request, fds, server)
        children.add(pid)
        with suppress(OSError):  # the child does the same: whoever comes first
            os.setpgid(pid, pid)
        for fd in fds:
            os.close(fd)
        lines.send({"pid": pid})

    try:
        lines.send({"ready": os.getpid()})
        while True:
            rests = not waiting and (bool(children) or not gathers)
            limit = pause if needed else None if rests else _IDLE
            ready = [key.fileobj for key, _ in selector.select(limit)]
            if not ready and needed:
                _load_ahead(needed.pop(0))
                pause = 0.0
            elif not ready and waiting:
                _load_ahead(waiting.pop(0))
            elif not ready:
                collapse()
                gathers = False
            if wake_read in ready:
                with suppress(BlockingIOError):
                    os.read(wake_read, 4096)
                for pid, status in _reap():
                    children.discard(pid)
                    lines.send({"exit": pid, "status": status})
            if control in ready:
                if not lines.read():
                    return
                for request, fds in lines.take():
                    if "ping" in request:
                        running = [pid for pid in request["of"] if _is_running(pid)]
                        lines.send({"pong": request["ping"], "running": running})
                    for name in request.get("load", ()):
                        _load_ahead(name)
                    # Only children that were not reaped: their pids can belong to no one else.
                    for pid in children.intersection(request.get("pids", ())):
                        _signal(pid, request["signal"])
                    if "fork" in request:
                        fork(request, fds)
    except (BrokenPipeError, ConnectionResetError, ValueError):
        return
    finally:
        for pid in children:
            _signal(pid, signal.SIGKILL)


def _is_running(pid: int) -> bool:
    """Return whether a process has not begun to end: it closes its files long before its end."""
    pf_exiting = 0x4
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] not in "ZX" and not int(fields[6]) & pf_exiting


def _signal(pid: int, number: int) -> None:
    """Signal a child; SIGKILL is also for what it has started: it leads a group of its own."""
    with suppress(ProcessLookupError, PermissionError):
        if number == signal.SIGKILL:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)


def _reap() -> list[tuple[int, int]]:
    ended = []
    with suppress(ChildProcessError):
        # Left a zombie for a moment more, the child still holds the number of its group.
        while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            _signal(found.si_pid, signal.SIGKILL)
            pid, status = os.waitpid(found.si_pid, 0)
            ended.append((pid, os.waitstatus_to_exitcode(status)))
    return ended


def _run_child(request: dict[str, Any], fds: list[int], server: int) -> NoReturn:
    status = 1
    try:
        die_with_parent(server)
        os.setpgid(0, 0)
        module, function = request["fork"].split(":")
        getattr(importlib.import_module(module), function)(fds, request["config"])
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # No interpreter shutdown: a thread stuck in a collective would abort the process.
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def collapse() -> None:
    """Have Linux gather this process's own memory in pages of 2 MB (6.1 or newer; else a no-op).

    A fork copies the table of its parent's pages, and its end takes that down again. With PyTorch
    loaded these are 60,000 entries of 4 kB each, most of what a fork costs. Gathering them takes
    half a second, once.

    A page that is written afterwards is copied as one of 4 kB, as ever: forks share as much.
    """
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps.read().splitlines():
            place, access, _, _, inode, *name = line.split()
            if access != "rw-p" or inode != "0" or name not in ([], ["[heap]"]):
                continue  # of a file, or a stack
            begin, end = (int(address, 16) for address in place.split("-"))
            begin, end = -(-begin // _HUGE) * _HUGE, end // _HUGE * _HUGE
            if begin < end:
                madvise(begin, end - begin, _MADV_COLLAPSE)  # what cannot be gathered stays


def main() -> None:
    """Load the modules named on the command line, then serve."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt ends
    _start_tracker()
    lists: list[list[str]] = [[]]
    for name in sys.argv[2:]:
        if name == "--":
            lists.append([])
        else:
            lists[-1].append(name)
    first, soon, later = [*lists, [], []][:3]
    for name in first:
        _load(name)
        if select.select([control], [], [], 0)[0]:  # it asks nothing yet: it has gone
            return
    serve(control, soon, later, gathers=True)


def _start_tracker() -> None:
    """Start Python's resource tracker, which ranks inherit; else each would start its own.

    That one would end with the rank, whose whole group of processes is killed.
    """
    before = os.environ.get("PYTHONWARNINGS")
    # Ranks are killed in any case: no reason to warn, in the end, of what they have left.
    os.environ["PYTHONWARNINGS"] = "ignore"
    try:
        with suppress(OSError):  # where no more processes are allowed, ranks start their own
            resource_tracker.ensure_running()
    finally:
        os.environ.pop("PYTHONWARNINGS")
        if before is not None:
            os.environ["PYTHONWARNINGS"] = before


def _load_ahead(name: str) -> None:
    """Import a module that ranks may need, such as IPython, which a bare machine may lack."""
    with suppress(Exception):  # the rank that needs it will say what is wrong
        _load(name)


def _load(name: str) -> None:
    """Import a module without the garbage collector, which would look through it for nothing.

    Frozen, its objects are not touched by the children's collectors either: they stay shared.
    """
    gc.disable()
    try:
        importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()


if __name__ == "__main__":
    main()
    # No interpreter shutdown here either: what is frozen is not freed, and compiled modules such as
    # Triton's, which PyTorch loads, would print a page about what leaked.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
