"""One thing that happened: what a rank did, from when to when."""

from __future__ import annotations

import functools
from typing import NamedTuple

from course_lib.ranks.explain.words import spans


class Event(NamedTuple):
    """One operation of one rank.

    Times are in seconds of one clock: the machine's monotonic one on processes, the virtual one on
    simulated ranks. A `Trace` counts them from its first event.
    """

    rank: int
    kind: str
    """As ``torch.distributed`` calls it: ``all_reduce``, ``send``, …; or ``compute``."""
    group: tuple[int, ...]
    """Members of the process group, as ranks of the whole."""
    peer: int | None
    """The other rank of a send or recv, the root of a rooted collective, else ``None``."""
    bytes: int
    """Size of the tensor that this rank put in (for a receive and a scatter: that it got)."""
    dtype: str
    """The tensor's dtype, for example ``float32``; empty where there is none."""
    seq: int
    """Number of the collective in its group, or of the message among those like it; from 1."""
    start: float
    end: float
    where: str
    """The line of the user's code, for example ``Cell In[3], line 7``."""
    group_name: str = ""
    """The process group's name for people: the ``group_desc`` it was made with (a device mesh gives
    ``mesh_tp``), else ``group 2``, the second that was made; empty for the group of all ranks."""
    waited: bool = True
    """Whether the rank waited for it, or asked whether it is over; else nothing says when its
    tensors may be used."""
    sent: int | None = None
    """Bytes for other ranks, where they are known: of an all_to_all, whose pieces may differ in
    length. Else they are derived: see `Trace.bytes_sent`."""


def computation(rank: int, start: float, end: float, where: str = "") -> Event:
    """Return the event of a rank that computes."""
    return Event(rank, "compute", (), None, 0, "", 0, start, end, where)


@functools.lru_cache(maxsize=4096)
def group_called(name: str, description: str = "") -> str:
    """Return what people call a process group: see `Event.group_name`.

    Args:
        name: PyTorch's: ``0`` is the group of all ranks, then they are numbered as they are made.
        description: its ``group_desc``, if it has one.

    """
    if description == "default_pg":
        return ""
    if description not in ("", "undefined"):
        return description
    return f"group {name}" if name.isdigit() and name != "0" else ""


def group_label(event: Event, world_size: int) -> str:
    """Return which process group an operation ran in: ``mesh_tp: 0, 1``; empty if all ranks."""
    members = "" if len(event.group) in (0, world_size) else spans(event.group)
    return ": ".join(filter(None, [event.group_name, members]))
