"""One thing that happened: what a rank did, from when to when."""

from __future__ import annotations

from typing import NamedTuple


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
    """Of that tensor, for example ``float32``; empty where there is none."""
    seq: int
    """Number of the collective in its group, or of the message among those like it; from 1."""
    start: float
    end: float
    where: str
    """The line of the user's code, for example ``Cell In[3], line 7``."""
    waited: bool = True
    """Whether the rank waited for it, or asked whether it is over; else nothing says when its
    tensors may be used."""


def computation(rank: int, start: float, end: float, where: str = "") -> Event:
    """Return the event of a rank that computes."""
    return Event(rank, "compute", (), None, 0, "", 0, start, end, where)
