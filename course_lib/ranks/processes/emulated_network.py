"""A slow network for real ranks: it computes when each operation ends, while gloo moves the data.

The parent of the ranks runs it in a thread. Every rank reports which operations it starts, and
when. After all participants have reported an operation, the network sends its messages over the
same `Links`, with the same algorithms, as the simulated network. Then it tells each rank when the
operation ends. So operations take the same time on both kinds of ranks, and the sending and the
receiving side of a link each carry one message at a time.

Messages of different groups that share a link take turns: each is sent when its own time has come,
and not when its collective begins.

On a rank, an `EmulatedLink` reports the operations that the rank starts, and is told the end of
each ahead of time. A thread that waits for an operation sleeps until its end. The data moves at
once, through gloo. So communication overlaps with computation, and buckets queue. The times agree
with the model as long as gloo is faster than the emulated network.
"""

from __future__ import annotations

import heapq
import math
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from course_lib.ranks.costs.collective_time import start_collective
from course_lib.ranks.costs.links import Links
from course_lib.ranks.costs.network import Network
from course_lib.ranks.costs.streams import Running, Streams
from course_lib.ranks.processes.rank_recorder import MeteredOperation

_AHEAD = 2e-3
"""Seconds by which messages are sent ahead of time, so that ranks learn an end before it comes."""


@dataclass(frozen=True)
class Offer:
    """An operation that one rank is ready for."""

    rank: int
    id: int
    """The rank's own number for the operation."""
    kind: str
    group: int
    seq: int
    members: tuple[int, ...]
    """The ranks of the group; for a message, sender and receiver."""
    tag: int
    posted: float
    """Since when the rank is ready, in seconds of the machine's monotonic clock."""
    sizes: Sequence[int]
    """Bytes of each tensor that the rank puts in; in a receive, that it gets."""
    root: int
    """The root, as a position among the members."""
    itemsize: int

    def key(self) -> tuple[Any, ...]:
        """Return what the offers of all participants have in common."""
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
        """Start again with free links, because the ranks have dropped all operations under way."""
        with self._lock:
            self._links = Links(self._network, len(self._connections))
            self._open: dict[tuple[Any, ...], dict[int, Offer]] = {}
            self._streams: Streams[Offer] = Streams(self._tell, self._push)
            self._heap: list[tuple[float, int, int, int, Running[Offer] | list[Offer]]] = []
            self._pushed = 0
            self._ends: dict[int, list[tuple[int, float]]] = {}

    def _run(self) -> None:
        left = selectors.DefaultSelector()
        for rank, connection in enumerate(self._connections):
            left.register(connection, selectors.EVENT_READ, rank)
        while left.get_map():
            # First take all reports that have arrived, and only then send.
            now = self._clock()
            for ready, _ in left.select(self._patience(now)):
                connection = self._connections[ready.data]
                try:
                    self._listen(connection)
                except (OSError, EOFError):  # the rank has ended
                    left.unregister(connection)
                    connection.close()
            with self._lock:
                self._send(now + _AHEAD)
                self._tell_all()
        left.close()

    def _listen(self, connection: Connection) -> None:
        """Take the reports of a rank."""
        while True:
            offer: Offer = connection.recv()
            with self._lock:
                self._take(offer)
            if not connection.poll():
                return

    def _patience(self, now: float) -> float | None:
        """Return the seconds until the next message must be sent; ``None`` if there is none."""
        with self._lock:
            return max(0.0, self._heap[0][0] - _AHEAD - now) if self._heap else None

    def _take(self, offer: Offer) -> None:
        """Note that a rank is ready for an operation; start it if all participants are ready."""
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
        first = (what.parts if isinstance(what, Running) else what)[0]
        self._pushed += 1
        heapq.heappush(self._heap, (start, first.id, first.rank, self._pushed, what))

    def _send(self, until: float) -> None:
        """Send the messages that start before `until`, in the order of their times."""
        while self._heap and self._heap[0][0] < until:
            start, *_, what = heapq.heappop(self._heap)
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
        """Tell every rank all its new ends in one message, because each message wakes the rank."""
        new_ends, self._ends = self._ends, {}
        for rank, ends in new_ends.items():
            with suppress(OSError):
                self._connections[rank].send(ends)


_LOOK_AGAIN = 3e-4
"""Seconds between two checks of gloo, when gloo is slower than the network."""
MAX_LAG = 0.003
"""Most seconds by which an operation counts as started earlier; see `Transfer.woke`."""


@dataclass
class Transfer:
    """One operation on its way through the emulated network."""

    link: EmulatedLink
    inner: dist.Work | None = None
    end: float = math.inf
    """When it ends, in seconds of the machine's monotonic clock; infinite until that is known."""
    end_known: threading.Event = field(default_factory=threading.Event)
    """Set when the end is known: both sides of a message, or all ranks of a group, have begun."""
    _callbacks: list[Callable[[], None]] = field(default_factory=list)

    def is_over(self) -> bool:
        """Return whether the network has completed the transfer by now."""
        return self.end <= time.monotonic()

    def wait(self) -> None:
        """Return when the network has completed the transfer."""
        self.end_known.wait()
        if (left := self.end - time.monotonic()) > 0:
            time.sleep(left)

    def when_over(self, callback: Callable[[], None]) -> None:
        """Call `callback` when network and gloo are done: now if they are, else in a new thread."""
        with self.link.lock:
            known = self.end_known.is_set()
            if not known:
                self._callbacks.append(callback)
        if known and self.is_over() and (self.inner is None or self.inner.is_completed()):
            callback()
        elif known:
            self._call_later(callback)

    def _end_at(self, end: float) -> None:
        with self.link.lock:
            self.end = end
            self.end_known.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            self._call_later(callback)

    def _call_later(self, callback: Callable[[], None]) -> None:
        call = self.link.given_up

        def run() -> None:
            self.wait()
            while self.inner is not None and not self.inner.is_completed():
                if self.link.given_up != call:
                    return
                time.sleep(_LOOK_AGAIN)
            callback()

        # Not in the link's thread: the callback may wait for an operation whose end only that
        # thread can report.
        threading.Thread(target=run, name="emulated-callback", daemon=True).start()

    def woke(self, waited_since: float, now: float) -> None:
        """Note at which time the rank goes on, which may be later than the network says.

        The machine may wake a rank late. The rank's next operation then counts as started earlier
        by that delay. Otherwise delays would add up along a chain of messages. If the transfer was
        over when the rank came to wait, the rank did not sleep, and its delay does not grow.
        """
        on_time = max(waited_since - self.link.lag, self.end)
        self.link.lag = min(max(0.0, now - on_time), MAX_LAG)


class EmulatedLink:
    """The link between one rank and the network."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.lag = 0.0
        self.lock = threading.Lock()
        self.given_up = 0
        """How many calls were given up."""
        self._count = 0
        self._open: dict[int, Transfer] = {}
        threading.Thread(target=self._run, name="emulated-link", daemon=True).start()

    def carry(
        self, what: MeteredOperation, sizes: Sequence[int], inner: dist.Work | None
    ) -> Transfer:
        """Return a transfer that is over when the network has carried the operation.

        Args:
            what: the operation.
            sizes: bytes of each tensor that this rank puts in; in a receive, that it gets.
            inner: the work that moves the data, if it ends by itself without a wait; else ``None``.

        """
        event, root = what.event, 0
        me, peer, members = event.rank, event.peer, event.group
        if what.channel is not None:
            assert peer is not None
            members = (me, peer) if what.channel.sends else (peer, me)
        elif peer is not None:
            root = members.index(peer)
        itemsize = getattr(torch, event.dtype, torch.uint8).itemsize
        ready = event.start - self.lag
        transfer = Transfer(self, inner)
        with self.lock:
            self._count += 1
            self._open[self._count] = transfer
            self._connection.send(
                Offer(
                    me, self._count, event.kind, what.group, event.seq, members, event.tag, ready,
                    sizes, root, itemsize,
                )
            )  # fmt: skip
        return transfer

    def forget(self) -> None:
        """Drop all operations under way, because the call was given up."""
        with self.lock:
            self._open.clear()
            self.lag = 0.0
            self.given_up += 1

    def _run(self) -> None:
        while True:
            try:
                ends = self._connection.recv()
            except (OSError, EOFError):  # the parent, which runs the network, has ended
                return
            for number, end in ends:
                with self.lock:
                    transfer = self._open.pop(number, None)
                if transfer is not None:  # else its call was given up
                    transfer._end_at(end)
