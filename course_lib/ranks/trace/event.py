"""Events: what a rank did, and from when to when."""

from __future__ import annotations

import functools
from typing import NamedTuple

from course_lib.ranks.explain.words import spans


class Event(NamedTuple):
    """One operation of one rank.

    Times are in seconds of one clock: the machine's monotonic clock on processes, the virtual clock
    on simulated ranks. In a `Trace`, they count from its first event.
    """

    rank: int
    kind: str
    """The name in ``torch.distributed``, such as ``all_reduce`` or ``send``; or ``compute``."""
    group: tuple[int, ...]
    """Members of the process group, as ranks of the group of all ranks."""
    peer: int | None
    """The other rank of a send or recv, the root of a rooted collective, else ``None``."""
    bytes: int
    """Size of the tensor that this rank put in, or got in a receive or a scatter."""
    dtype: str
    """The tensor's dtype, for example ``float32``; empty if there is no tensor."""
    seq: int
    """Number of the collective in its group, or of the message from its sender to its receiver;
    from 1. On processes, messages of different groups or tags are counted separately. A receive has
    the number of its send."""
    start: float
    end: float
    where: str
    """The line of the user's code, for example ``Cell In[3], line 7``."""
    group_name: str = ""
    """The process group's name for people. It is the ``group_desc`` it was made with (a device mesh
    gives ``mesh_tp``), else for example ``group 2`` for the second group that was made. It is empty
    for the group of all ranks."""
    waited: bool = True
    """Whether the rank waited for the operation, or asked whether it is complete. If not, nothing
    says when its tensors may be used."""
    sent: int | None = None
    """Bytes for other ranks, if they are known: for an all_to_all, whose pieces may differ in
    length. Otherwise they are derived: see `Trace.bytes_sent`."""
    tag: int = 0
    """The tag of a message."""
    turn: int = 0
    """The place of the operation among those that the rank started at the same `start`. Known on
    simulated ranks."""
    lines: tuple[tuple[str, int], ...] = ()
    """The user's own functions that were running, the outermost first: the name, for example
    ``data_parallel.finish``, and the line that it was on; of a recursion, the innermost line.
    Line 1 is the function's first line. Known on simulated ranks."""


def computation(rank: int, start: float, end: float, where: str = "") -> Event:
    """Return the event of a rank that computes."""
    return Event(rank, "compute", (), None, 0, "", 0, start, end, where)


@functools.lru_cache(maxsize=4096)
def group_called(name: str, description: str = "") -> str:
    """Return the name of a process group for people: see `Event.group_name`.

    Args:
        name: PyTorch's name. ``0`` is the group of all ranks; later groups are numbered in order.
        description: its ``group_desc``, if it has one.

    """
    if description == "default_pg":
        return ""
    if description not in ("", "undefined"):
        return description
    return f"group {name}" if name.isdigit() and name != "0" else ""


def group_label(event: Event, world_size: int) -> str:
    """Return the process group of an operation: ``mesh_tp: 0, 1``; empty for all ranks."""
    members = "" if len(event.group) in (0, world_size) else spans(event.group)
    return ": ".join(filter(None, [event.group_name, members]))
