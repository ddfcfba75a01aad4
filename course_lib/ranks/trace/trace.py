"""The communication of one call, with counters, a table, a figure and a file for Perfetto."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from course_lib.ranks.costs.collective_time import collective_bytes
from course_lib.ranks.costs.network import Network
from course_lib.ranks.explain.words import counted, format_bytes
from course_lib.ranks.trace.event import Event, group_label
from course_lib.ranks.trace.lanes import with_lanes
from course_lib.ranks.trace.table import Table
from course_lib.ranks.trace.timeline import draw_timeline

if TYPE_CHECKING:
    from course_lib.ranks.trace.figure import DescribedFigure

_PLAIN = Network(latency=0.0, bandwidth=1.0)


class Trace:
    """The operations of one `Ranks.run`, in the order of their start.

    Args:
        events: the events, in any order, or a function that reads them when they are needed.
        world_size: number of ranks.
        dropped: number of operations that are missing because a trace holds only so many.
        network: the bytes of collectives are derived from its algorithms. By default these are a
            ring for all_reduce, all_gather and reduce_scatter, as in gloo, and trees from and to a
            root.

    """

    def __init__(
        self,
        events: Sequence[Event] | Callable[[], Sequence[Event]],
        world_size: int,
        *,
        dropped: int = 0,
        network: Network | None = None,
    ) -> None:
        self._given = events
        self.world_size = world_size
        self.dropped = dropped
        self.network = network or _PLAIN

    @cached_property
    def events(self) -> list[Event]:
        """One `Event` per operation and rank, in the order of their starts.

        Times count from the first start, in seconds. Events of kind ``compute`` are the times
        between the waits of a rank. Most traces are never looked at, so a log is read only here.
        """
        events = self._given() if callable(self._given) else self._given
        self._given = ()
        zero = min((event.start for event in events), default=0.0)
        shifted = [
            event._replace(start=event.start - zero, end=event.end - zero) for event in events
        ]
        return sorted(shifted, key=lambda event: (event.start, event.rank))

    @property
    def operations(self) -> list[Event]:
        """The events that are communication."""
        return [event for event in self.events if event.kind != "compute"]

    def between(self, start: float, end: float = math.inf) -> Trace:
        """Return the events that start in [start, end) seconds, shifted so that the first is at 0.

        For example, one step of many can then be counted or drawn separately.
        """
        part = [event for event in self.events if start <= event.start < end]
        return Trace(part, self.world_size, network=self.network)

    def calls(self, rank: int) -> Counter[str]:
        """Return how often `rank` called each operation: ``{"all_reduce": 2}``."""
        return Counter(event.kind for event in self.operations if event.rank == rank)

    def bytes_sent(self, rank: int, *, group: str | None = None) -> int:
        """Return the bytes that `rank` sends in messages and in collectives.

        With `group`, only process groups with this `Event.group_name` count.

        The bytes of a collective are derived from the algorithm that `network` uses for it. A
        library may send a little more, and in a different order. In a ring all_reduce of n bytes on
        K ranks, each rank sends 2 (K-1)/K n. See `costs.collective_time.collective_bytes`.
        """
        return sum(
            self._sent(event)
            for event in self.operations
            if event.rank == rank and group in (None, event.group_name)
        )

    def _sent(self, event: Event) -> int:
        """Return the bytes that an operation sends from its rank."""
        if event.kind in ("send", "recv"):
            return event.bytes if event.kind == "send" else 0
        if event.sent is not None:
            return event.sent
        root = 0 if event.peer is None else event.group.index(event.peer)
        itemsize = getattr(torch, event.dtype).itemsize if event.dtype else 1
        sent = collective_bytes(
            event.kind, self.network, len(event.group), event.bytes, root, itemsize
        )
        return sent[event.group.index(event.rank)]

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

    def table(self) -> Table:
        """Return the operations as a table, one line each: text, which a notebook shows as HTML.

        The column `group` is empty if all ranks take part. The column `sent` holds the bytes that
        the rank sends. For a collective, they are derived as in `bytes_sent`.
        """
        head = ("start", "end", "rank", "operation", "group", "peer", "size", "sent", "dtype")
        rows: list[tuple[str, ...]] = [(*head, "line")]
        for e in self.operations:
            peer = "" if e.peer is None else str(e.peer)
            start, end = f"{1e3 * e.start:.2f} ms", f"{1e3 * e.end:.2f} ms"
            size, sent = format_bytes(e.bytes), format_bytes(self._sent(e))
            group = group_label(e, self.world_size)
            row = (start, end, str(e.rank), e.kind, group, peer, size, sent, e.dtype, e.where)
            rows.append(row)
        return Table(rows)

    def plot(self, *, title: str = "") -> DescribedFigure:
        """Draw the ranks over time, computation above communication; return the figure.

        Every operation is a hatched bar with its name, so that no information is in colour alone.
        Operations of one rank that overlap in time are drawn below one another. A notebook shows
        the figure with a description, its `alt`. Assign a better one if you know what the figure
        shows. A figure that is neither shown nor saved when the cell ends is then shown.

        Raises:
            ValueError: there is nothing to draw.

        """
        figure = draw_timeline(self.events, self.world_size, title)
        figure.show_when_the_cell_ends()
        return figure

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
            f"<Trace of {counted(self.world_size, 'rank')}: "
            f"{counted(len(self.operations), 'operation')}{dropped} "
            f"in {1e3 * self.makespan:.1f} ms>"
        )
