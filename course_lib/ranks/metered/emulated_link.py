"""A rank's end of an emulated network: what it starts, it tells; what is over, it is told.

The data moves at once, through gloo; but an operation is over only when the `EmulatedNetwork`
would have carried it. A thread of its own listens for the ends, which are told ahead of time;
whoever waits for one sleeps until then. So communication overlaps with computation, and buckets
queue. As long as gloo itself is faster than the emulated network, the times are those of the model.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from course_lib.ranks.metered.recorder import MeteredOperation

_LOOK_AGAIN = 3e-4
"""Seconds between two looks at gloo, where it is later than the network."""
_MOST_AT_ONCE = 64
"""Operations that a rank tells of at once, so that what it writes is never long."""
MAX_LAG = 0.003
"""Seconds by which an operation counts as started earlier, at most: see `Transfer.woke`."""


@dataclass
class Transfer:
    """One operation on its way through the emulated network."""

    link: EmulatedLink
    inner: dist.Work | None = None
    end: float = math.inf
    """When it is over, in seconds of the machine's monotonic clock; known once all are ready."""
    told: threading.Event = field(default_factory=threading.Event)
    """Set when the end is known: the two sides of a message, or all of a group, have begun."""
    _callbacks: list[Callable[[], None]] = field(default_factory=list)

    def is_over(self) -> bool:
        """Return whether the network has carried it by now."""
        return self.end <= time.monotonic()

    def wait(self) -> None:
        """Return when the network has carried it."""
        self.told.wait()
        if (left := self.end - time.monotonic()) > 0:
            time.sleep(left)

    def when_over(self, callback: Callable[[], None]) -> None:
        """Call `callback` when all is over, in a thread of its own; at once if it is."""
        with self.link.lock:
            told = self.told.is_set()
            if not told:
                self._callbacks.append(callback)
        if told and self.is_over() and (self.inner is None or self.inner.is_completed()):
            callback()
        elif told:
            self._call_later(callback)

    def _end_at(self, end: float) -> None:
        with self.link.lock:
            self.end = end
            self.told.set()
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

        # Not in the link's thread: it may wait for an operation, of whose end that would tell.
        threading.Thread(target=run, name="emulated-callback", daemon=True).start()

    def woke(self, waited_since: float, now: float) -> None:
        """Take note that the rank goes on, later than the network would let it.

        The machine woke it late. What it starts next counts as started earlier by so much; else
        the delays would add up along a chain of messages. A rank that came to wait when the
        transfer was over was not woken at all: it is as late as it was before.
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
        self._held: list[str] = []
        self._holding = 0
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
            self._held.append(json.dumps(offer))
            if not self._holding or len(self._held) == _MOST_AT_ONCE:
                self._tell()
        return transfer

    @contextmanager
    def together(self) -> Iterator[None]:
        """Tell the network at once of what is started meanwhile: one wake-up instead of many."""
        with self.lock:
            self._holding += 1
        try:
            yield
        finally:
            with self.lock:
                self._holding -= 1
                if not self._holding:
                    self._tell()

    def _tell(self) -> None:
        if self._held:
            self._connection.send_bytes(f"[{','.join(self._held)}]".encode())
            self._held.clear()

    def forget(self) -> None:
        """Drop what is under way: the call was given up."""
        with self.lock:
            self._open.clear()
            self._held.clear()
            self.lag = 0.0
            self.given_up += 1

    def _run(self) -> None:
        while True:
            try:
                ends = json.loads(self._connection.recv_bytes())
            except (OSError, EOFError):  # the network is the parent's: it has gone
                return
            for number, end in ends:
                with self.lock:
                    transfer = self._open.pop(number, None)
                if transfer is not None:  # else its call was given up
                    transfer._end_at(end)
