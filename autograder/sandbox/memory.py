"""Limit the memory of all processes of a submission together, by the kernel or by polling.

`HardLimits` limit each process, but a submission may have two hundred processes. If this user may
make a control group (cgroup v2), the kernel enforces a limit on the sum. Otherwise the grader
measures the sum now and then, and ends a submission that uses too much.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import psutil

from autograder.sandbox.cores import fields_of, is_first

_GROUPS = Path("/sys/fs/cgroup")
_count = itertools.count(1)
_SOCKET = 212_992
"""Bytes that Linux lets a socket send before they are read, net.core.wmem_default."""
_DESCRIPTOR = 4096
"""Bytes for each end of a pipe, of which Linux gives two pages to a user who has many."""


class MemoryGroup:
    """A new control group with a limit. `make` returns one if possible."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def make(cls, limit: int, processes: int) -> MemoryGroup | None:
        """Return a new group, or None if there is no cgroup v2 that this user may divide.

        Args:
            limit: bytes of memory, swap included.
            processes: largest number of processes.

        """
        group = _own_group()
        if group is None or not (_GROUPS / "cgroup.controllers").exists():
            return None
        group_path = _GROUPS / group.lstrip("/")
        # A group that has processes cannot have a child with controllers, but a sibling may.
        for base in (group_path, group_path.parent) if group_path != _GROUPS else (group_path,):
            path = base / f"sgd-to-ddp-{os.getpid()}-{next(_count)}"
            try:
                with contextlib.suppress(OSError):
                    (base / "cgroup.subtree_control").write_text("+memory +pids")
                path.mkdir()
                for name in ("cgroup.procs", "memory.max", "pids.max"):
                    os.stat(path / name)  # only the kernel makes files here
                (path / "memory.max").write_text(str(limit))
                (path / "pids.max").write_text(str(processes))
            except OSError:
                with contextlib.suppress(OSError):
                    path.rmdir()
                continue
            with contextlib.suppress(OSError):  # the kernel may not count swap
                (path / "memory.swap.max").write_text("0")
            return cls(path)
        return None

    def add(self, pids: list[int]) -> None:
        """Put these processes, and so all processes that they start, into the group."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                (self.path / "cgroup.procs").write_text(str(pid))

    def times_over(self) -> int:
        """Return how often memory ran out at exactly this limit, and not at a parent group's limit.

        The counter ``oom_kill`` is no use, because it also counts processes of the group that were
        killed because the whole machine, or a container around it, had no memory left.
        """
        return _counter(self.path / "memory.events.local", "oom")

    def close(self) -> None:
        """Remove the group, after its processes have ended."""
        with contextlib.suppress(OSError):
            self.path.rmdir()


def _own_group() -> str | None:
    """Return the group of this process, from the root of cgroup v2."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                return line[3:]
    return None


def descendants(ancestor: int) -> list[int]:
    """Return all descendants of the process `ancestor`, as seen in our pid namespace."""
    # psutil reads every process of the machine, which takes fifty times as long.
    if not os.path.exists("/proc/thread-self/children"):  # a kernel that was built without it
        return [child.pid for child in psutil.Process(ancestor).children(recursive=True)]
    pids: list[int] = []
    waiting = [ancestor]
    while waiting:
        below = _children(waiting.pop())
        pids += below
        waiting += below
    return pids


def _children(parent: int) -> list[int]:
    """Return the children of all threads of `parent`, as the kernel lists them."""
    pids: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{parent}/task"):
            with contextlib.suppress(OSError):
                listed = Path(f"/proc/{parent}/task/{thread}/children").read_text()
                pids += map(int, listed.split())
    return pids


def killed_for_memory() -> int:
    """Return how many processes the kernel has killed on this machine for lack of memory."""
    return _counter(Path("/proc/vmstat"), "oom_kill")


def _counter(path: Path, counter: str) -> int:
    """Return a counter of one of the kernel's files; 0 if it has no such counter."""
    with contextlib.suppress(OSError, LookupError, ValueError):
        return int(fields_of(path)[counter][0])
    return 0


def held_memory(pid: int) -> int:
    """Return the bytes of this process's memory that no file backs; 0 if the process is gone.

    Its page tables are included. Memory that processes share counts for each of them, see
    `exact_memory`.
    """
    return _sum_of(f"/proc/{pid}/status", ("RssAnon", "RssShmem", "VmPTE"))


def exact_memory(pid: int) -> int:
    """Return the same, but of memory that n processes share, an n-th. Linux must look at each page.

    Where only root may ask for it, the result is that of `held_memory`.
    """
    exact = _sum_of(f"/proc/{pid}/smaps_rollup", ("Pss_Anon", "Pss_Shmem"))
    return exact + _sum_of(f"/proc/{pid}/status", ("VmPTE",)) if exact else held_memory(pid)


def unmapped_memory(pids: Sequence[int], exact: bool = False) -> int:
    """Return the bytes that the cells of these processes hold without any process showing them.

    These are files in memory, and what the buffers of all sockets and pipes may hold: Linux does
    not say how full they are. If `exact`, files that processes have mapped are left out.
    """
    files = buffers = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            buffers += _DESCRIPTOR * len(os.listdir(f"/proc/{pid}/fd"))
            if is_first(pid):
                for folder in ("tmp", "dev/shm"):
                    disk = os.statvfs(f"/proc/{pid}/root/{folder}")
                    files += (disk.f_blocks - disk.f_bfree) * disk.f_frsize
                sockets = Path(f"/proc/{pid}/net/sockstat").read_text().split()[2]
                buffers += _SOCKET * int(sockets)
    if exact and files:
        files -= sum(_sum_of(f"/proc/{pid}/smaps_rollup", ("Pss_Shmem",)) for pid in pids)
    return max(0, files) + buffers


def _sum_of(path: str, names: Sequence[str]) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = fields_of(path)
        return sum(1024 * int(fields[name][0]) for name in names if name in fields)
    return 0
