"""What the ranks communicated in one call: counters, a table, a figure, a file for a viewer."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from course_lib.ranks.explain.errors import format_bytes
from course_lib.ranks.metered.recorder import Event

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Trace:
    """The operations of one `Ranks.run`, in the order of their start.

    Attributes:
        events: one `Event` per operation and rank; times count from the first start, in seconds.
            Events of kind ``compute`` are the times between the waits of a rank.
        dropped: how many more operations there were than a trace holds.

    """

    def __init__(self, events: Sequence[Event], world_size: int, *, dropped: int = 0) -> None:
        self.world_size = world_size
        self.dropped = dropped
        zero = min((event.start for event in events), default=0.0)
        shifted = [
            event._replace(start=event.start - zero, end=event.end - zero) for event in events
        ]
        self.events = sorted(shifted, key=lambda event: (event.start, event.rank))

    @property
    def operations(self) -> list[Event]:
        """The events that are communication."""
        return [event for event in self.events if event.kind != "compute"]

    def calls(self, rank: int) -> Counter[str]:
        """Return how often `rank` called each operation: ``{"all_reduce": 2}``."""
        return Counter(event.kind for event in self.operations if event.rank == rank)

    def bytes_sent(self, rank: int) -> int:
        """Return the bytes of `rank`'s sends (point to point; collectives are not counted)."""
        return sum(e.bytes for e in self.events if e.rank == rank and e.kind == "send")

    def peers(self, rank: int) -> set[int]:
        """Return the ranks that `rank` sent to or received from, point to point."""
        return {
            event.peer
            for event in self.events
            if event.rank == rank and event.kind in ("send", "recv") and event.peer is not None
        }

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        return max((event.end for event in self.events), default=0.0)

    def table(self) -> str:
        """Return the operations as a table, one line each."""
        rows = [("start", "end", "rank", "operation", "peer", "size", "dtype", "line")]
        for e in self.operations:
            peer = "" if e.peer is None else str(e.peer)
            start, end = f"{1e3 * e.start:.2f} ms", f"{1e3 * e.end:.2f} ms"
            rows.append(
                (start, end, str(e.rank), e.kind, peer, format_bytes(e.bytes), e.dtype, e.where)
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )

    def plot(self, *, title: str = "") -> Figure:
        """Draw the ranks over time, computation above communication; return the figure.

        Every operation is a hatched bar with its name, so that nothing is told by colour alone.
        Operations of one rank that overlap in time lie below one another.

        Raises:
            ValueError: there is nothing to draw.

        """
        from course_lib.ranks.trace.timeline import draw_timelines

        return draw_timelines({title: self})

    def to_chrome(self, path: str | os.PathLike[str]) -> None:
        """Write the events for ``chrome://tracing`` or https://ui.perfetto.dev, as JSON."""
        lines: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
            for rank in range(self.world_size)
        ]
        lines += [
            {
                "name": event.kind,
                "cat": "compute" if event.kind == "compute" else "communication",
                "ph": "X",
                "pid": event.rank,
                "tid": lane,
                "ts": 1e6 * event.start,
                "dur": 1e6 * (event.end - event.start),
                "args": {
                    name: value
                    for name, value in event._asdict().items()
                    if name not in ("kind", "rank", "start", "end")
                },
            }
            for event, lane in with_lanes(self.events)
        ]
        Path(path).write_text(json.dumps({"traceEvents": lines, "displayTimeUnit": "ms"}))

    def __repr__(self) -> str:
        dropped = f" and {self.dropped} more" if self.dropped else ""
        return (
            f"<Trace of {self.world_size} ranks: {len(self.operations)} operations{dropped} "
            f"in {1e3 * self.makespan:.1f} ms>"
        )


def with_lanes(events: Sequence[Event]) -> list[tuple[Event, int]]:
    """Return each event with its lane: 0 for computation, from 1 on for communication.

    Operations of one rank that overlap get different lanes.
    """
    free: dict[int, list[float]] = {}
    placed = []
    for event in sorted(events, key=lambda e: e.start):
        if event.kind == "compute":
            placed.append((event, 0))
            continue
        lanes = free.setdefault(event.rank, [])
        lane = next((i for i, end in enumerate(lanes) if end <= event.start), len(lanes))
        lanes[lane : lane + 1] = [event.end]
        placed.append((event, lane + 1))
    return placed
