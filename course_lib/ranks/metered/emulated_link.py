"""A rank's end of an emulated network: what it starts, it tells; what is over, it is told.

The data moves at once, through gloo; but an operation is over only when the `EmulatedNetwork`
would have carried it. A thread of its own waits for the ends, so that communication overlaps with
computation, and buckets queue. As long as gloo itself is faster than the emulated network, the
times are those of the model.
"""

from __future__ import annotations

import heapq
import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

import torch
import torch.distributed as dist

from course_lib.ranks.metered.recorder import MeteredOperation

_LOOK_AGAIN = 3e-4
"""Seconds between two looks at gloo, where it is later than the network."""
MAX_LAG = 0.003
"""Seconds by which an operation counts as started earlier, at most: see `Transfer.woke`."""


@dataclass
class Transfer:
    """One operation on its way through the emulated network."""

    link: EmulatedLink
    inner: dist.Work | None = None
    end: float = math.inf
    """When it is over, in seconds of the machine's monotonic clock; known once all are ready."""
    over: threading.Event = field(default_factory=threading.Event)
    _callbacks: list[Callable[[], None]] = field(default_factory=list)

    def when_over(self, callback: Callable[[], None]) -> None:
        """Call `callback` when it is over, in a thread of its own; at once if it is."""
        with self.link.lock:
            if not self.over.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def woke(self, waited_since: float, now: float) -> None:
        """Take note that the rank goes on, later than the network would let it.

        The machine woke it late. What it starts next counts as started earlier by so much; else
        the delays would add up along a chain of messages. A rank that came to wait when the
        transfer was over was not woken at all: it is as late as it was before.
        """
        on_time = max(waited_since - self.link.lag, self.end)
        self.link.lag = min(max(0.0, now - on_time), MAX_LAG)

    def _finish(self) -> None:
        with self.link.lock:
            self.over.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            # Not in this thread: it may wait for an operation, of whose end this thread would tell.
            threading.Thread(target=callback, name="emulated-callback", daemon=True).start()


class EmulatedLink:
    """The link between one rank and the network."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.lag = 0.0
        self.lock = threading.Lock()
        self._count = 0
        self._open: dict[int, Transfer] = {}
        threading.Thread(target=self._run, name="emulated-link", daemon=True).start()

    def carry(
        self, what: MeteredOperation, sizes: Sequence[int], inner: dist.Work | None
    ) -> Transfer:
        """Return a transfer that is over when the network has carried the operation.

        Args:
            what: the operation.
            sizes: bytes of each tensor that this rank puts in; of a receive, that it gets.
            inner: the work that moves the data, if it ends without anybody waiting for it.

        """
        me, peer = what.recorder.rank, what.peer
        members, tag, root = what.members, 0, 0
        if what.channel is not None:
            assert peer is not None
            members = (me, peer) if what.channel.sends else (peer, me)
            tag = what.channel.tag
        elif peer is not None:
            root = members.index(peer)
        itemsize = getattr(torch, what.dtype, torch.uint8).itemsize
        ready = what.start - self.lag
        transfer = Transfer(self, inner)
        with self.lock:
            self._count += 1
            self._open[self._count] = transfer
            offer = [self._count, what.kind, what.group, what.seq, members, tag]
            offer += [ready, list(sizes), root, itemsize]
            self._connection.send_bytes(json.dumps(offer).encode())
        return transfer

    def forget(self) -> None:
        """Drop what is under way: the call was given up."""
        with self.lock:
            self._open.clear()
            self.lag = 0.0

    def _run(self) -> None:
        ends: list[tuple[float, int]] = []
        while True:
            patience = ends[0][0] - time.monotonic() if ends else None
            if patience is None or patience > 0:
                if wait([self._connection], patience):
                    try:
                        number, end = json.loads(self._connection.recv_bytes())
                    except (OSError, EOFError):  # the network is the parent's: it has gone
                        return
                    with self.lock:
                        if number in self._open:
                            self._open[number].end = end
                    heapq.heappush(ends, (end, number))
                continue
            _, number = heapq.heappop(ends)
            with self.lock:
                transfer = self._open.get(number)
                if transfer is None:
                    continue
                late = transfer.inner is not None and not transfer.inner.is_completed()
                if not late:
                    del self._open[number]
            if late:
                heapq.heappush(ends, (time.monotonic() + _LOOK_AGAIN, number))
            else:
                transfer._finish()
