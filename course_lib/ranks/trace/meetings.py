"""Match the events of ranks: which receive belongs to a send, and for whom an operation waits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from course_lib.ranks.trace.event import Event

_FROM_ROOT = ("broadcast", "scatter")
_TO_ROOT = ("reduce", "gather")


class Wait(NamedTuple):
    """The first part of an operation, in which a different rank has not come yet."""

    rank: int
    """The rank that is waited for; if there are several, the last one to come."""
    until: float
    """When this rank comes, in seconds."""


def messages(events: Sequence[Event]) -> dict[int, int]:
    """Return, for each send whose receive is in `events`, both indices: send → receive."""

    def envelope(event: Event, sender: int | None, receiver: int | None) -> tuple[object, ...]:
        return sender, receiver, event.group, event.group_name, event.tag, event.seq

    sends = {envelope(e, e.rank, e.peer): i for i, e in enumerate(events) if e.kind == "send"}
    return {
        sends[key]: i
        for i, e in enumerate(events)
        if e.kind == "recv" and (key := envelope(e, e.peer, e.rank)) in sends
    }


def waits(events: Sequence[Event]) -> dict[int, Wait]:
    """Return the waits of all operations that wait for a rank: index in `events` → `Wait`.

    An operation waits from its own start until the other rank of a message, the root, or the last
    of all members has also begun it. An operation that ends earlier has not waited.
    """
    all_waits = {}
    for send, receive in messages(events).items():
        for index, other in ((send, receive), (receive, send)):
            all_waits.update(_wait(events, index, [other]))
    together: dict[tuple[object, ...], list[int]] = {}
    for i, event in enumerate(events):
        if event.kind not in ("compute", "send", "recv"):
            key = (event.kind, event.group, event.group_name, event.seq)
            together.setdefault(key, []).append(i)
    for members in together.values():
        for index in members:
            event, awaited = events[index], members
            at_root = event.rank == event.peer
            if event.kind in _FROM_ROOT:
                awaited = [i for i in members if events[i].rank == event.peer]
            elif event.kind in _TO_ROOT and not at_root:
                awaited = []
            all_waits.update(_wait(events, index, awaited))
    return all_waits


def _wait(events: Sequence[Event], index: int, awaited: Iterable[int]) -> dict[int, Wait]:
    start, end = events[index].start, events[index].end
    last = max(awaited, key=lambda i: events[i].start, default=index)
    came = events[last].start
    if not start < came <= end:
        return {}
    return {index: Wait(events[last].rank, came)}
