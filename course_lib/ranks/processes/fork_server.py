"""The process that ranks are forked from: Python with torch loaded, and nothing started.

A fresh Python needs seconds to import torch; a fork of this process needs milliseconds. It is safe
to fork because it has one thread, has run no tensor operation (that would start OpenMP's threads,
which a fork loses) and has not touched CUDA (a context cannot be forked).

It runs only the code of this file. Its parent talks to it over a socket, in values of `wire`:

                                                               ← {"ready": 100}
    → {"fork": "module:function", "config": {…}, "fds": 3}  with 3 descriptors     ← {"pid": 123}
    → the same, with "spawn": true, for a process that is no fork but a new Python
    → {"signal": 9, "pids": [123, …]}
    → {"load": ["module", …]}
    → {"remove": "folder"}, in the end
    → {"ping": 7, "of": [123, …]}                ← {"pong": 7, "running": [123]}
                                                               ← {"exit": 123, "status": -9}

When the socket closes, however the parent ended, all ranks and this process end. A rank that is
killed cannot clean up. So a process that outlives all ranks, Python's resource tracker, records
their semaphores and shared memory, such as those of spawned DataLoader workers, and removes them
in the end.

Start: ``python -P -m course_lib.ranks.processes.fork_server FD MODULE… -- MODULE…``. FD is the
socket. The first modules are loaded before any fork. The others are loaded one by one, each after a
second without a request.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import resource_tracker
from typing import Any, NoReturn

from course_lib.ranks import wire

_MAX_REQUEST = 1 << 20
_MAX_FDS = 64
_MADV_COLLAPSE = 25
_HUGE = 2 << 20
_IDLE = 1.0
"""Seconds without a request after which one more of the later modules is loaded."""


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process when process `parent` ends (Linux; elsewhere a no-op).

    If this process has its own pid namespace, its parent has no number there and appears as 0. Then
    this process ends anyway, together with the outer namespace in which the parent lives.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() not in (parent, 0):  # the parent ended before the request
            os._exit(1)


def serve(
    control: socket.socket,
    later: Sequence[str] = (),
    fork_process: Callable[[], int] = os.fork,
    gathers: bool = False,
) -> None:
    """Answer requests on `control` until it closes; then end every child.

    The modules `later` are loaded one by one, each after `_IDLE` seconds without a request. After
    that, if `gathers`, memory is gathered in huge pages as soon as no child shares it.
    `fork_process` forks as `os.fork` does.
    """
    waiting = list(later)
    children: set[int] = set()
    folders: list[str] = []
    reader, held = wire.Reader(_MAX_REQUEST), list[int]()
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    os.set_blocking(wake_read, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    selector.register(wake_read, selectors.EVENT_READ)

    def fork(request: dict[str, Any], fds: list[int]) -> None:
        server = os.getpid()
        pid = _spawn(request, fds) if request.get("spawn") else fork_process()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            selector.close()
            control.close()
            os.close(wake_read)
            os.close(wake_write)
            _run_child(request, fds, server)
        children.add(pid)
        with suppress(OSError):  # the child does the same; one of the two is first
            os.setpgid(pid, pid)
        for fd in fds:
            os.close(fd)
        wire.send(control, {"pid": pid})

    try:
        wire.send(control, {"ready": os.getpid()})
        while True:
            rests = not waiting and (bool(children) or not gathers)
            ready = [key.fileobj for key, _ in selector.select(None if rests else _IDLE)]
            if not ready and waiting:
                _load(waiting.pop(0))
            elif not ready:
                collapse()
                gathers = False
            if wake_read in ready:
                with suppress(BlockingIOError):
                    os.read(wake_read, 4096)
                for pid, status in _reap():
                    children.discard(pid)
                    wire.send(control, {"exit": pid, "status": status})
            if control in ready:
                piece, fds, _, _ = socket.recv_fds(control, wire.PIECE, _MAX_FDS)
                if not piece:
                    return
                held += fds
                for request in reader.feed(piece):
                    if "ping" in request:
                        running = [pid for pid in request["of"] if _is_running(pid)]
                        wire.send(control, {"pong": request["ping"], "running": running})
                    for name in request.get("load", ()):
                        _load(name)
                    folders += [request["remove"]] if "remove" in request else []
                    # Signal only children that were not reaped: their pids cannot be reused yet.
                    for pid in children.intersection(request.get("pids", ())):
                        _signal(pid, request["signal"])
                    if "fork" in request:
                        fork(request, [held.pop(0) for _ in range(request["fds"])])
    except (BrokenPipeError, ConnectionResetError, ValueError):
        return
    finally:
        for pid in children:
            _signal(pid, signal.SIGKILL)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _is_running(pid: int) -> bool:
    """Return whether a process has not begun to end. It closes its files long before it is gone."""
    pf_exiting = 0x4
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] not in "ZX" and not int(fields[6]) & pf_exiting


def _signal(pid: int, number: int) -> None:
    """Signal a child; send SIGKILL to its whole process group, so to all that it has started."""
    with suppress(ProcessLookupError, PermissionError):
        if number == signal.SIGKILL:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)


def _reap() -> list[tuple[int, int]]:
    """Return (pid, exit status) of the children that have ended; end what they have started."""
    ended = []
    with suppress(ChildProcessError):
        while (pid_and_status := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = pid_and_status
            # No other group has this number yet: numbers are given in turn.
            _signal(pid, signal.SIGKILL)
            ended.append((pid, os.waitstatus_to_exitcode(status)))
    return ended


def _spawn(request: dict[str, Any], fds: list[int]) -> int:
    """Start what `_run_child` does in a new Python, which can do what a fork cannot on macOS."""
    code = "from course_lib.ranks.processes.fork_server import spawned; spawned()"
    arguments = [json.dumps(request), json.dumps(fds), str(os.getpid())]
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", code, *arguments], pass_fds=fds, process_group=0
    )
    child.returncode = 0  # only `_reap` waits for it
    return child.pid


def spawned() -> NoReturn:
    """Run a request that is on the command line, as `_spawn` has written it."""
    request, fds, server = map(json.loads, sys.argv[1:])
    _run_child(request, fds, server)


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
        # Skip the interpreter's shutdown: a thread stuck in a collective would abort the process.
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def collapse() -> None:
    """Have Linux gather this process's own memory in pages of 2 MB (6.1 or newer; else a no-op).

    A fork copies the table of its parent's pages, and its end removes the copy again. With PyTorch
    loaded, the table has 60,000 entries for pages of 4 kB, which are most of a fork's cost.
    Gathering the pages takes half a second, once.

    If a fork writes to a page later, only 4 kB are copied, as before. So forks share as much memory
    as before.
    """
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps.read().splitlines():
            addresses, access, _, _, inode, *name = line.split()
            if access != "rw-p" or inode != "0" or name not in ([], ["[heap]"]):
                continue  # memory of a file, or a stack
            begin, end = (int(address, 16) for address in addresses.split("-"))
            begin, end = -(-begin // _HUGE) * _HUGE, end // _HUGE * _HUGE
            if begin < end:
                madvise(begin, end - begin, _MADV_COLLAPSE)  # a failure changes nothing


def main() -> None:
    """Load the modules named on the command line, then serve."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt ends
    _start_tracker()
    names = sys.argv[2:]
    border = names.index("--")
    news = select.poll()
    news.register(control, select.POLLIN)
    for name in names[:border]:
        _load(name)
        if news.poll(0):  # no request can come yet: the parent has ended
            return
    if sys.platform == "darwin" and "torch" in sys.modules:
        # `torch.manual_seed` calls it, and Metal aborts a fork. Ranks use CPUs only on a Mac.
        sys.modules["torch"].mps.manual_seed = lambda seed: None
    serve(control, names[border + 1 :], gathers=True)


def _start_tracker() -> None:
    """Start Python's resource tracker, which ranks inherit; else each would start its own.

    A rank's own tracker would end with the rank, because the rank's process group is killed.
    """
    # Ranks are always killed, so a warning about what they have left would be no news.
    sys.warnoptions.append("ignore")
    with suppress(OSError):  # if no more processes are allowed, ranks start their own tracker
        resource_tracker.ensure_running()
    # In newer Pythons a forked process leaves its parent's tracker (gh-146313), but for this.
    if intent := getattr(resource_tracker, "_fork_intent", None):
        intent.preserve_fd = True
    sys.warnoptions.pop()


def _load(name: str) -> None:
    """Import a module without the garbage collector, which would find nothing to free.

    It may be missing, as IPython on a bare machine: the rank that needs it reports what is wrong.

    The module's objects are frozen, so the children's collectors do not touch them either, and
    their memory remains shared.
    """
    gc.disable()
    try:
        with suppress(Exception):
            importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()


if __name__ == "__main__":
    main()
    # Skip the interpreter's shutdown here, too: frozen objects are not freed, and compiled modules
    # such as Triton's, which PyTorch loads, would print a page about leaks.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
