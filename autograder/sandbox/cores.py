"""Measure how long processes ran on the machine's cores, and how long they waited for a core.

Linux counts both for every task: the time on a core, and the time in which the task was ready to
run but had no core (``/proc/PID/schedstat``, see the kernel's
Documentation/scheduler/sched-stats.rst). A process that sleeps adds to neither.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_TICK = 1 / os.sysconf("SC_CLK_TCK")


class Cores(NamedTuple):
    """Seconds of one process since its start.

    Attributes:
        ran: time of all its threads together on a core, including ended threads.
        waited: time in which its main thread wanted a core and had none.
        stopped: whether a signal from outside has stopped it. No signal from inside can do so,
            because it is process 1 of a pid namespace.

    """

    ran: float
    waited: float
    stopped: bool = False


def cores_of(pids: Iterable[int]) -> dict[int, Cores]:
    """Return the times of the processes that still exist; nothing if Linux does not count them."""
    times = {}
    for pid in pids:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
            waited = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
            # The command's name, in parentheses, may itself contain spaces and parentheses.
            state, *fields = stat.rpartition(")")[2].split()
            user, system = fields[10:12]
            stopped = state == "T" and is_first(pid)
        except (OSError, ValueError, IndexError):
            continue
        times[pid] = Cores((int(user) + int(system)) * _TICK, waited, stopped)
    return times


def fields_of(path: str | Path) -> dict[str, list[str]]:
    """Return the lines of one of the kernel's files: first word, without its colon → the others."""
    lines = map(str.split, Path(path).read_text(errors="replace").splitlines())
    return {name.rstrip(":"): values for name, *values in filter(None, lines)}


def is_first(pid: int) -> bool:
    """Return whether this process is number 1 of its pid namespace, and not of ours."""
    pids = fields_of(f"/proc/{pid}/status").get("NSpid", [])
    return len(pids) > 1 and pids[-1] == "1"
