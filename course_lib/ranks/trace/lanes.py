"""Lanes for the events of a rank: events that overlap in time get different lanes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from course_lib.ranks.trace.event import Event


def with_lanes(events: Sequence[Event]) -> list[tuple[Event, int]]:
    """Return each event with its lane: 0 for computation, from 1 on for communication.

    Operations of one rank that overlap get different lanes. So do operations that take no time and
    begin together, because one would hide the other.
    """
    free: dict[int, list[float]] = {}
    placed = []
    # Events that begin together have the same order on every rank, shortest first.
    for event in sorted(events, key=lambda e: (e.start, e.end)):
        if event.kind == "compute":
            placed.append((event, 0))
            continue
        lanes = free.setdefault(event.rank, [])
        lane = next((i for i, end in enumerate(lanes) if end <= event.start), len(lanes))
        lanes[lane : lane + 1] = [max(event.end, math.nextafter(event.start, math.inf))]
        placed.append((event, lane + 1))
    return placed
