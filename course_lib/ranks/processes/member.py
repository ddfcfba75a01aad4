"""The parent's side of one process that it has forked: a rank, or the host of simulated ranks.

It also finds out what a silent rank is doing. On a signal, ``faulthandler`` in the rank writes the
rank's stack to a file. It needs no help from the interpreter. So it also works while the rank is in
compiled code, or in a loop that swallows every exception.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course_lib.ranks.explain.failure import Failure, with_labels
from course_lib.ranks.explain.lines import innermost_function, line_in_dump
from course_lib.ranks.memory import anonymous_file
from course_lib.ranks.output.printer import RankOutput
from course_lib.ranks.processes.board_views import RankPhase, RankView
from course_lib.ranks.processes.fork_client import ForkServer
from course_lib.ranks.processes.object_pipe import Answer, ObjectPipe

_ASLEEP_AFTER = 0.5
"""Seconds without any use of the processor after which a rank is asked for its stack."""
_PROC = Path("/proc")
_DUMP_LIMIT = 10.0
"""Seconds for all stacks together; the fork server, which passes the signal, may be importing."""


@dataclass
class Member:
    """The parent's side of one process."""

    rank: int
    pid: int
    on_gpu: bool
    pipe: ObjectPipe
    output: RankOutput
    dump_fd: int
    dump_at: int = 0
    """Where in the dump file the next dump begins."""
    answer: Answer | None = None
    """The answer to the call; ``None`` until it has arrived."""
    failure: Failure | None = None
    """The failure, if the rank answered with one."""
    ticks: int = -1
    asleep_since: float | None = None
    seen_in_backward: bool = False

    def last_words(
        self, server: ForkServer, labels: Mapping[str, str]
    ) -> tuple[int | None, str, str]:
        """Return, after its end: the exit status, the stack, and the line of the user's code."""
        status = server.exit_status(self.pid, wait=2)
        dump = read_dump(self.dump_fd, self.dump_at)
        return status, with_labels(dump, labels), line_in_dump(dump, labels)

    def close(self) -> None:
        """Close what belongs to the process, which has ended."""
        self.pipe.close()
        self.output.close()
        os.close(self.dump_fd)


def fork_member(
    server: ForkServer,
    function: str,
    config: Mapping[str, Any],
    fds: Mapping[str, int],
    show: Callable[[int, str], None],
    *,
    rank: int = 0,
    on_gpu: bool = False,
) -> Member:
    """Fork a process that runs ``module:function``, with a pipe, an output and a file for stacks.

    Args:
        server: forks it.
        function: gets a list of descriptors, and `config` with their names as ``"fds"``.
        config: what else it gets.
        fds: name → descriptor, beside ``pipe``, ``output`` and ``dump``.
        show: called with its rank and each line that it prints.
        rank: its rank.
        on_gpu: whether it uses a GPU.

    """
    parent_end, child_end = socket.socketpair()
    read, write = os.pipe()
    dump = anonymous_file("stacks")
    fds_by_name = {"pipe": child_end.fileno(), "output": write, "dump": dump, **fds}
    try:
        config = {**config, "fds": list(fds_by_name)}
        pid = server.fork(function, config, list(fds_by_name.values()))
    except BaseException:
        parent_end.close()
        os.close(read)
        os.close(dump)
        raise
    finally:
        child_end.close()
        os.close(write)
    output = RankOutput(rank, read, show)
    return Member(rank, pid, on_gpu, ObjectPipe(parent_end, private=False), output, dump)


def ask_for_stacks(server: ForkServer, members: Sequence[Member]) -> dict[int, str]:
    """Have ranks write their stacks; return rank → text."""
    _skip_dumps(members)
    server.signal([member.pid for member in members], signal.SIGUSR1)
    until = time.monotonic() + _DUMP_LIMIT
    dumps = {m.rank: wait_for_dump(m.dump_fd, m.dump_at, until) for m in members}
    _skip_dumps(members)  # the last words of a rank that crashes later are not these
    return dumps


def _skip_dumps(members: Sequence[Member]) -> None:
    for member in members:
        member.dump_at = os.fstat(member.dump_fd).st_size


def find_asleep(
    server: ForkServer, members: Sequence[Member], views: Sequence[RankView], now: float
) -> list[int]:
    """Return the ranks that sleep inside autograd while some of their operations are not over.

    PyTorch's DDP waits there for its buckets. Such a rank sleeps, uses no processor time, and its
    innermost Python line is the call of the compiled engine.
    """
    asleep = []
    for member, view in zip(members, views, strict=True):
        if view.state is not RankPhase.RUNNING or not view.pending:
            member.asleep_since = None
            continue
        state = cpu_state(member.pid, whole_process=member.on_gpu)
        if state is None or state[0] != "S" or state[1] != member.ticks:
            member.asleep_since, member.seen_in_backward = None, False
            member.ticks = -1 if state is None else state[1]
            continue
        member.asleep_since = member.asleep_since or now
        if now - member.asleep_since < _ASLEEP_AFTER:
            continue
        if not member.seen_in_backward:
            stack = ask_for_stacks(server, [member])[member.rank]
            member.seen_in_backward = innermost_function(stack) == "_engine_run_backward"
            if not member.seen_in_backward:
                member.asleep_since = now  # ask again only after a while
        if member.seen_in_backward:
            asleep.append(member.rank)
    return asleep


def read_dump(fd: int, offset: int = 0) -> str:
    """Return the text of a dump file from `offset` on."""
    size = min(os.fstat(fd).st_size - offset, 1 << 16)
    return os.pread(fd, size, offset).decode("utf-8", "replace") if size > 0 else ""


def wait_for_dump(fd: int, offset: int, until: float) -> str:
    """Return the dump that a signal has requested; empty if it does not come in time."""
    text = ""
    while time.monotonic() < until:
        before, text = text, read_dump(fd, offset)
        if text and text == before:
            break
        time.sleep(0.005)
    return text


def cpu_state(pid: int, whole_process: bool) -> tuple[str, int] | None:
    """Return (state, CPU ticks used) of a process or its main thread; ``None`` if it has ended.

    macOS has no ``/proc``, and tells nothing of one thread. There, a tick is long enough for what
    other threads of a waiting rank use, and the state is "S": a busy process has new ticks.
    """
    path = _PROC / (f"{pid}/stat" if whole_process else f"{pid}/task/{pid}/stat")
    try:
        fields = path.read_text(errors="replace").rpartition(")")[2].split()
        return fields[0], int(fields[11]) + int(fields[12])
    except OSError:
        if _PROC.is_dir():
            return None
    import psutil

    try:
        process = psutil.Process(pid)
        used = process.cpu_times()
        ended = process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return None
    return None if ended else ("S", int(10 * (used.user + used.system)))
