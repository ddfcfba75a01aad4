"""A slow network for real ranks: it says when an operation is over; the data has long arrived.

The parent of the ranks runs it, in a thread. Every rank tells it what it starts, and when; once
all who take part have told, it sends the messages over the same `Links`, by the same algorithms,
as the simulated network, and tells each rank its end. So both kinds of ranks take the same time,
and the sending and the receiving side of a link are busy with one message at a time.

Messages that share a link take turns, whichever group they are of: each is sent when its moment
has come, and not when its collective begins.
"""

from __future__ import annotations

import heapq
import json
import math
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from course_lib.ranks.costs.collective_time import start_collective
from course_lib.ranks.costs.links import Links
from course_lib.ranks.costs.network import Network
from course_lib.ranks.costs.streams import Running, Streams

_AHEAD = 2e-3
"""Seconds by which messages are sent before their moment, so that ranks hear of an end in time."""


@dataclass(frozen=True)
class Offer:
    """What one rank is ready for."""

    rank: int
    id: int
    """The rank's own number for it."""
    kind: str
    group: int
    seq: int
    members: tuple[int, ...]
    """Of a message: sender and receiver."""
    tag: int
    posted: float
    """Since when it is ready, in seconds of the machine's monotonic clock."""
    sizes: Sequence[int]
    """Bytes of each tensor that the rank puts in; of a receive, that it gets."""
    root: int
    """As a position among the members."""
    itemsize: int

    def key(self) -> tuple[Any, ...]:
        """Return what all who take part have in common."""
        kind = "message" if self.kind in ("send", "recv") else self.kind
        return (kind, self.group, self.members, self.tag, self.seq)


class EmulatedNetwork:
    """The network of K ranks, each at the other end of a connection.

    Args:
        network: what messages cost.
        connections: to each rank's `EmulatedLink`.
        clock: the machine's monotonic clock.

    """

    def __init__(
        self,
        network: Network,
        connections: Sequence[Connection],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._network = network
        self._connections = list(connections)
        self._clock = clock
        self._lock = threading.Lock()
        self.forget()
        threading.Thread(target=self._run, name="emulated-network", daemon=True).start()

    def forget(self) -> None:
        """Begin anew, with free links: the ranks have dropped what was under way."""
        with self._lock:
            self._links = Links(self._network, len(self._connections))
            self._open: dict[tuple[Any, ...], dict[int, Offer]] = {}
            self._streams: Streams[Offer] = Streams(self._tell, self._push)
            self._heap: list[tuple[float, int, int, Running[Offer] | list[Offer]]] = []
            self._pushed = 0
            self._ends: dict[int, list[tuple[int, float]]] = {}

    def _run(self) -> None:
        left = selectors.DefaultSelector()
        for rank, connection in enumerate(self._connections):
            left.register(connection, selectors.EVENT_READ, rank)
        while left.get_map():
            # Whatever was told by now is taken before anything is sent.
            now = self._clock()
            for ready, _ in left.select(self._patience(now)):
                connection = self._connections[ready.data]
                try:
                    self._listen(ready.data, connection)
                except (OSError, EOFError, ValueError, TypeError):  # the rank has ended
                    left.unregister(connection)
                    connection.close()
            with self._lock:
                self._send(now + _AHEAD)
                self._tell_all()
        left.close()

    def _listen(self, rank: int, connection: Connection) -> None:
        """Take what a rank has told."""
        while True:
            together = json.loads(connection.recv_bytes(1 << 16))
            with self._lock:
                for told in together:
                    told[4] = tuple(told[4])
                    self._take(Offer(rank, *told))
            if not connection.poll():
                return

    def _patience(self, now: float) -> float | None:
        """Return the seconds until the next message is to be sent; ``None``: there is none."""
        with self._lock:
            return max(0.0, self._heap[0][0] - _AHEAD - now) if self._heap else None

    def _take(self, offer: Offer) -> None:
        """Note what a rank is ready for; let it begin if all are who take part."""
        offers = self._open.setdefault(offer.key(), {})
        offers[offer.rank] = offer
        if len(offers) < len(offer.members):
            return
        del self._open[offer.key()]
        parts = [offers[member] for member in offer.members]
        if offer.kind in ("send", "recv"):
            self._push(max(part.posted for part in parts), parts)
            return
        transfer = start_collective(
            offer.kind,
            self._network,
            self._links,
            offer.members,
            [part.sizes for part in parts],
            offer.root,
            offer.itemsize,
        )
        self._streams.add(parts, transfer)

    def _push(self, start: float, what: Running[Offer] | list[Offer]) -> None:
        rank = (what.parts if isinstance(what, Running) else what)[0].rank
        self._pushed += 1
        heapq.heappush(self._heap, (start, rank, self._pushed, what))

    def _send(self, until: float) -> None:
        """Send the messages that start before `until`, in the order of their times."""
        while self._heap and self._heap[0][0] < until:
            start, _, _, what = heapq.heappop(self._heap)
            if isinstance(what, Running):
                others = min(until, self._heap[0][0]) if self._heap else until
                self._streams.go_on(what, max(others, math.nextafter(start, math.inf)))
                continue
            sender, receiver = what
            left, arrival = self._links.send(sender.rank, receiver.rank, sum(sender.sizes), start)
            self._tell(sender, left)
            self._tell(receiver, arrival)

    def _tell(self, offer: Offer, end: float) -> None:
        self._ends.setdefault(offer.rank, []).append((offer.id, end))

    def _tell_all(self) -> None:
        """Tell every rank its new ends at once: each time it is told, it wakes."""
        told, self._ends = self._ends, {}
        for rank, ends in told.items():
            with suppress(OSError):
                self._connections[rank].send_bytes(json.dumps(ends).encode())
