"""A slow network on a fast machine: every rank has one link, which carries in series each way.

The data moves at once, through gloo; but an operation is over only when the emulated network
would have carried it. A message that both sides are ready for at time t leaves at

    start = max(t, link free),     arrives at  start + α + n/β,     link free = start + n/β

with latency α (s), bandwidth β (bytes/s) and n bytes. Of messages that reach a rank at the same
time, a later one arrives n/β after the one before it. A collective starts when the links of all
members are free, and takes as long as `costs.collective_time` says. All of it runs in a thread of
its own, so that communication overlaps with computation, and buckets queue.

As long as gloo itself is faster than the emulated network, the times are those of the model.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from course_lib.ranks.board.board import Board
from course_lib.ranks.costs.collective_time import collective_time
from course_lib.ranks.costs.network import Network
from course_lib.ranks.metered.recorder import MeteredOperation

_POLL = 3e-4, 2e-3
"""Seconds between two looks whether the other side is ready: the least and the most."""
MAX_LAG = 0.003
"""Seconds by which an operation counts as started earlier, at most: see `Transfer.woke`."""


@dataclass
class Transfer:
    """One operation on its way through the emulated network; `future` is done when it is."""

    link: EmulatedLink
    operation: MeteredOperation
    inner: dist.Work | None = None
    offered: bool = False
    ready: float = 0.0
    end: float = math.inf
    future: torch.futures.Future[Any] = field(default_factory=torch.futures.Future)

    @cached_property
    def seconds(self) -> float:
        """What a collective takes on the emulated network, once all its ranks are ready."""
        what = self.operation
        dtype = getattr(torch, what.dtype, torch.uint8)
        root = 0 if what.peer is None else what.members.index(what.peer)
        return collective_time(
            what.kind, self.link.network, len(what.members), what.bytes, root, dtype.itemsize
        )

    def woke(self, waited_since: float, now: float) -> None:
        """Take note that the rank goes on, later than the network would let it.

        The machine woke it late. What it starts next counts as started earlier by so much; else
        the delays would add up along a chain of messages. A rank that came to wait when the
        transfer was over was not woken at all: it is as late as it was before.
        """
        on_time = max(waited_since - self.link.lag, self.end)
        self.link.lag = min(max(0.0, now - on_time), MAX_LAG)


class EmulatedLink:
    """The link of one rank."""

    def __init__(self, network: Network, board: Board, rank: int) -> None:
        self.network, self._board, self._rank = network, board, rank
        self._free = 0.0
        self._free_for_arrivals = 0.0
        self.lag = 0.0
        self._collectives: deque[Transfer] = deque()
        self._messages: list[Transfer] = []
        self._travelling: list[Transfer] = []
        self._work = threading.Condition()
        threading.Thread(target=self._run, name="emulated-link", daemon=True).start()

    def carry_collective(self, operation: MeteredOperation, inner: dist.Work) -> Transfer:
        """Return a transfer that is done when the network has carried the collective."""
        return self._add(self._collectives, Transfer(self, operation, inner))

    def carry_message(self, operation: MeteredOperation) -> Transfer:
        """Return a transfer that is done when the message has left, or has arrived."""
        return self._add(self._messages, Transfer(self, operation))

    def _add(self, queue: Any, transfer: Transfer) -> Transfer:
        what = transfer.operation
        transfer.ready = what.start - self.lag
        if what.channel is not None and not what.channel.sends:  # says when this side was ready
            self._board.set_message_start(self._rank, what.channel, what.seq, transfer.ready)
        with self._work:
            queue.append(transfer)
            self._work.notify()
        return transfer

    def _run(self) -> None:
        while True:
            with self._work:
                while not (self._collectives or self._messages or self._travelling):
                    self._work.wait()
                self._start_collectives()
                self._messages = [each for each in self._messages if not self._start(each)]
                now = time.monotonic()
                arrived = [each for each in self._travelling if each.end <= now]
                self._travelling = [each for each in self._travelling if each.end > now]
                ends = [each.end for each in self._travelling]
                poll = self._poll()
            for each in arrived:
                try:
                    done = each.inner.get_future().value() if each.inner is not None else None
                    each.future.set_result(done)
                except RuntimeError as error:  # gloo lost a connection: whoever waits shall hear it
                    each.future.set_exception(error)
            soon = min([*ends, now + poll])
            if soon == math.inf:  # nothing is under way
                continue
            time.sleep(max(0.0, soon - time.monotonic()))

    def _poll(self) -> float:
        """Return the seconds until the next look at what waits for its other side.

        A start that is seen late is no later: an end is reckoned from what the sides have written
        down. So a tenth of the transfer's time is soon enough, and leaves the cores to computation.
        """
        times = [self.network.time(each.operation.bytes) for each in self._messages]
        if self._collectives:
            times.append(self._collectives[0].seconds)
        least, most = _POLL
        return min(max(min(times) / 10, least), most) if times else math.inf

    def _start_collectives(self) -> None:
        """Start the collectives, one after the other, that all their members are ready for."""
        while self._collectives:
            transfer = self._collectives[0]
            what = transfer.operation
            if not transfer.offered:
                moment = max(transfer.ready, self._free)
                self._board.set_collective_start(self._rank, what.group, what.seq, moment)
                transfer.offered = True
            if transfer.inner is not None and not transfer.inner.is_completed():
                return
            starts = [self._board.collective_start(m, what.group, what.seq) for m in what.members]
            if not all(starts):
                return
            self._collectives.popleft()
            transfer.end = self._free = max(starts) + transfer.seconds
            self._travelling.append(transfer)

    def _start(self, transfer: Transfer) -> bool:
        """Start a message if its other side is ready; return whether it is on its way."""
        what = transfer.operation
        assert what.channel is not None
        other = what.channel.other_end(self._rank)
        theirs = self._board.message_start(what.channel.peer, other, what.seq)
        if not theirs:
            return False
        seconds = what.bytes / self.network.bandwidth
        if what.channel.sends:
            start = max(transfer.ready, theirs, self._free)
            transfer.end = self._free = start + seconds
            self._board.set_message_start(self._rank, what.channel, what.seq, start)
        else:
            first_byte = max(theirs + self.network.latency, self._free_for_arrivals)
            transfer.end = self._free_for_arrivals = first_byte + seconds
        self._travelling.append(transfer)
        return True
