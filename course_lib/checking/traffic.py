"""Count from a trace what ranks send and receive; the expectations use these counts.

In a message, the sender sends the tensor and the receiver receives it. In a collective, a rank
*sends* the data that it hands over and *receives* the data that it has at the end; the algorithm
does not matter. For an all-reduce of n bytes, a rank sends n bytes and receives n. For an
all-gather among K ranks, it sends n and receives K·n.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from course_lib.ranks.explain.words import counted, format_bytes
from course_lib.ranks.trace.event import Event
from course_lib.ranks.trace.trace import Trace

_SAID = 4


def operations(trace: Trace, rank: int, kinds: Iterable[str] | None = None) -> list[Event]:
    """Return the rank's operations in the order of their launch; if given, only of these kinds."""
    wanted = None if kinds is None else set(kinds)
    return [
        event
        for event in trace.operations
        if event.rank == rank and (wanted is None or event.kind in wanted)
    ]


def after_the_barrier(trace: Trace) -> Trace | None:
    """Return what follows the only barrier of all ranks; None unless there is exactly one."""
    barriers = [
        event
        for event in trace.operations
        if event.kind == "barrier" and len(event.group) == trace.world_size
    ]
    began = {event.rank: event.start for event in barriers}
    if not len(barriers) == len(began) == trace.world_size:
        return None
    later = [event for event in trace.events if event.start > began[event.rank]]
    return Trace(later, trace.world_size, network=trace.network)


def sent(event: Event) -> int:
    """Return the bytes that the event's rank sent."""
    root = event.peer == event.rank
    if event.kind in ("recv", "barrier") or (event.kind == "broadcast" and not root):
        return 0
    if event.kind == "scatter":
        return event.bytes * len(event.group) if root else 0
    return event.bytes


def received(event: Event) -> int:
    """Return the bytes that the event's rank received."""
    root, k = event.peer == event.rank, max(1, len(event.group))
    match event.kind:
        case "send" | "barrier":
            return 0
        case "broadcast":
            return 0 if root else event.bytes
        case "reduce":
            return event.bytes if root else 0
        case "gather":
            return event.bytes * k if root else 0
        case "all_gather":
            return event.bytes * k
        case "reduce_scatter":
            return event.bytes // k
    return event.bytes


def in_words(events: Sequence[Event]) -> str:
    """Return operations in words, equal ones together: how many, what, to whom, on which line."""
    groups: dict[tuple[str, int | None, str], list[int]] = {}
    for event in events:
        groups.setdefault((event.kind, event.peer, event.where), []).append(event.bytes)
    lines = [
        f"{len(sizes)} × {_in_words(*named, sizes)}"
        for named, sizes in list(groups.items())[:_SAID]
    ]
    if rest := sum(map(len, list(groups.values())[_SAID:])):
        lines.append(f"{counted(rest, 'more operation')}")
    return "; ".join(lines) or "nothing"


def name_of(event: Event) -> str:
    """Return one operation in words: what, to whom, its bytes, on which line."""
    return _in_words(event.kind, event.peer, event.where, [event.bytes])


def _in_words(kind: str, peer: int | None, where: str, sizes: Sequence[int]) -> str:
    size = format_bytes(min(sizes))
    if max(sizes) > min(sizes):
        size += f" to {format_bytes(max(sizes))}"
    named = {"send": f" to rank {peer}", "recv": f" from rank {peer}"}
    whom = "" if peer is None else named.get(kind, f" with root {peer}")
    return f"{kind}{whom}, {size}" + (f" ({where})" if where else "")
