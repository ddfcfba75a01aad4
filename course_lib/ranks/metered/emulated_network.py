"""A slow network for real ranks: it says when an operation is over; the data has long arrived.

The parent of the ranks runs it, in a thread. Every rank tells it what it starts, and when; once
all who take part have told, it sends the messages over the same `Links`, by the same algorithms,
as the simulated network, and tells each rank its end. So both kinds of ranks take the same time,
and the sending and the receiving side of a link are busy with one message at a time.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from course_lib.ranks.costs.collective_time import start_collective
from course_lib.ranks.costs.links import Links
from course_lib.ranks.costs.network import Network


@dataclass(frozen=True)
class Offer:
    """What one rank is ready for, from `ready` on (seconds of the machine's monotonic clock)."""

    id: int
    """The rank's own number for it."""
    kind: str
    group: int
    seq: int
    members: tuple[int, ...]
    """Of a message: sender and receiver."""
    tag: int
    ready: float
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
    """The network of K ranks, each at the other end of a connection."""

    def __init__(self, network: Network, connections: Sequence[Connection]) -> None:
        self._network = network
        self._connections = list(connections)
        self._lock = threading.Lock()
        self.forget()
        threading.Thread(target=self._run, name="emulated-network", daemon=True).start()

    def forget(self) -> None:
        """Begin anew, with free links: the ranks have dropped what was under way."""
        with self._lock:
            self._links = Links(self._network, len(self._connections))
            self._open: dict[tuple[Any, ...], dict[int, Offer]] = {}
            self._streams: dict[tuple[int, int], float] = {}

    def _run(self) -> None:
        left = {id(connection): rank for rank, connection in enumerate(self._connections)}
        while left:
            waiting = [each for each in self._connections if id(each) in left]
            for connection in wait(waiting):
                assert isinstance(connection, Connection)
                try:
                    told = json.loads(connection.recv_bytes(1 << 16))
                    told[4] = tuple(told[4])
                    offer = Offer(*told)
                except (OSError, EOFError, ValueError, TypeError):  # the rank has ended
                    del left[id(connection)]
                    connection.close()
                    continue
                self._take(left[id(connection)], offer)

    def _take(self, rank: int, offer: Offer) -> None:
        with self._lock:
            offers = self._open.setdefault(offer.key(), {})
            offers[rank] = offer
            if len(offers) < len(offer.members):
                return
            del self._open[offer.key()]
            ends = self._ends(offer, offers)
        for member, end in ends.items():
            with suppress(OSError):
                self._connections[member].send_bytes(json.dumps([offers[member].id, end]).encode())

    def _ends(self, offer: Offer, offers: dict[int, Offer]) -> dict[int, float]:
        members = offer.members
        if offer.kind in ("send", "recv"):
            sender, receiver = members
            ready = max(each.ready for each in offers.values())
            nbytes = sum(offer.sizes)
            left, arrival = self._links.send(sender, receiver, nbytes, ready)
            return {sender: left, receiver: arrival}
        transfer = start_collective(
            offer.kind,
            self._network,
            self._links,
            members,
            [offers[member].sizes for member in members],
            offer.root,
            offer.itemsize,
        )
        for place, member in enumerate(members):
            # A group's collectives follow one another on each rank, as on a stream of NCCL.
            before = self._streams.get((offer.group, member), 0.0)
            transfer.enter(place, max(offers[member].ready, before))
        while transfer.advance():
            pass
        ends = dict(zip(members, transfer.times, strict=True))
        self._streams |= {(offer.group, member): end for member, end in ends.items()}
        return ends
