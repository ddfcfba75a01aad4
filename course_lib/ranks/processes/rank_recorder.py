"""A rank's notes about its communication: one `Event` per operation."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from course_lib.ranks.explain.waiting import waits_in
from course_lib.ranks.processes.board import Board
from course_lib.ranks.processes.board_views import MessageChannel, RankPhase, Wait
from course_lib.ranks.trace.event import Event, computation

MAX_EVENTS = 200_000
"""Most events that one rank keeps per call; further ones are only counted."""
_SETTLE = 0.5
_LOOK = 2e-4
"""Seconds between two checks whether works on streams are over, and so the error of their ends."""
_MAX_KEPT = 64
_MAX_KEPT_BYTES = 1 << 22
_ACTIVE = (RankPhase.STARTING, RankPhase.RUNNING, RankPhase.BLOCKED, RankPhase.LIMITED)


@dataclass
class RankRecorder:
    """Shared by the process groups of one rank: the board, and the log of the current call."""

    board: Board
    rank: int
    events: list[Event]
    locate: Callable[[], str]
    """Returns the line of user code that is running, for example ``Cell In[3], line 7``."""
    blocked: list[tuple[float, float]] = field(default_factory=list)
    """Intervals in which the rank's own thread waited for communication."""
    broken: bool = False
    """Whether an operation passed its own time limit: gloo cannot use its connections again."""
    limit: float = math.inf
    """Seconds that an operation waits until the other ranks have started it too."""
    dropped: int = 0
    open_messages: set[Any] = field(default_factory=set)
    """Works of unfinished messages. They are kept, as gloo drops a message without its work."""
    open_collectives: set[Any] = field(default_factory=set)
    """Works of collectives that are not yet in the log."""
    calls: int = 0
    """How many calls have begun; a group's slot on the board is valid for one call."""
    given_up: int = 0
    """How many calls were given up. Operations that began before are not logged at their end."""
    _kept: deque[tuple[Any, int]] = field(default_factory=deque)
    _kept_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _launched: threading.Event = field(default_factory=threading.Event)
    _watching: threading.Thread | None = None

    def note(self, event: Event) -> int:
        """Add an event to the log of this call; return its index, or -1 if the log is full."""
        if len(self.events) < MAX_EVENTS:
            self.events.append(event)
            return len(self.events) - 1
        self.dropped += 1
        return -1

    def add_pending(self, change: int) -> None:
        """Count an operation that was launched (+1) or is over (-1), in any thread."""
        with self._lock:
            self.board.add_pending(self.rank, change)

    def keep(self, work: Any, nbytes: int) -> None:
        """Keep a finished work for a while.

        C++ may still hold the work when no Python code does: DDP's join does so with a work of a
        few bytes. Without its Python part, the work has no future. Its tensors are kept with it, so
        only few works are kept.
        """
        with self._lock:
            self._kept.append((work, nbytes))
            self._kept_bytes += nbytes
            while len(self._kept) > _MAX_KEPT or self._kept_bytes > _MAX_KEPT_BYTES:
                self._kept_bytes -= self._kept.popleft()[1]

    def watch_streams(self) -> None:
        """Start a thread that notes the ends of works on streams, as the host does not wait."""
        if self._watching is None:
            self._watching = threading.Thread(target=self._watch_streams, daemon=True)
            self._watching.start()
        self._launched.set()

    def _watch_streams(self) -> None:
        while self._launched.wait():
            self._launched.clear()
            works = [*self.open_collectives, *self.open_messages]
            for work in works:
                if work.streams:
                    self._launched.set()
                    work.poll()
            time.sleep(_LOOK)

    def begin(self) -> None:
        """Begin the log of a new call. The board may have been cleared before it."""
        self.calls += 1
        self.board.forget_places()
        self.events.clear()
        self.blocked.clear()
        self.open_messages.clear()
        self.open_collectives.clear()
        self._kept.clear()
        self._kept_bytes = 0
        self.dropped = 0

    def give_up(self) -> None:
        """Forget the operations under way, because they will never end."""
        with self._lock:
            self.given_up += 1
        for work in [*self.open_collectives, *self.open_messages]:
            work.give_up()
        self.open_messages.clear()
        self.open_collectives.clear()

    def settle(self) -> None:
        """Wait, at the end of a call, until its collectives are in the log.

        The collectives of DDP end with a callback in a thread of gloo, which may run after the step
        that used them. While other ranks still run, one of them may have yet to take part, and the
        call would wait for that rank anyway. After that, `_SETTLE` seconds are enough. A message
        that both sides have started is logged as over, too, even if nothing waits for it.
        """
        if not self.open_messages and not self.open_collectives:
            return
        for message in list(self.open_messages):
            message.poll()
        last = time.monotonic()
        pause = 1e-4
        while self.open_collectives:
            for work in list(self.open_collectives):
                work.poll()
            now = time.monotonic()
            views = self.board.views()
            if any(view.state in _ACTIVE and view.rank != self.rank for view in views):
                last = now
            if now - last > _SETTLE:
                return
            time.sleep(pause)
            pause = min(2 * pause, 1e-2)

    def compute(self, start: float, end: float) -> list[Event]:
        """Return the computation between the waits of a call that ran from `start` to `end`.

        A wait inside compiled code is not known here and counts as computation. An example is the
        wait of PyTorch's DDP for its last bucket.
        """
        if not self.blocked:
            return [computation(self.rank, start, end)] if end > start else []
        spans, at = [], start
        for begin, over in [*sorted(self.blocked), (end, end)]:
            if begin > at:
                spans.append(computation(self.rank, at, begin))
            at = max(at, over)
        return spans[:MAX_EVENTS]


@dataclass
class MeteredOperation:
    """One operation from its launch until it is over: shown on the board, then in the log."""

    recorder: RankRecorder
    kind: str
    members: tuple[int, ...]
    peer: int | None
    bytes: int
    dtype: str
    where: str
    wait: Wait
    group: int
    seq: int
    channel: MessageChannel | None = None
    start: float = field(default_factory=time.monotonic)
    begun_in: int = field(init=False)
    """Value of `RankRecorder.given_up` when it was launched."""
    group_name: str = ""
    """The group's name in text for people; see `Event.group_name`."""
    sent: int | None = None
    """Bytes for other ranks, if known; see `Event.sent`."""
    _waited: bool = False
    _blocked_since: float = 0.0
    _noted: tuple[int, Event] | None = None

    def __post_init__(self) -> None:
        self.begun_in = self.recorder.given_up

    def block(self, limited: bool = False) -> None:
        """Show that the rank waits until this operation, or its own time limit, is over."""
        self._blocked_since = time.monotonic()
        self.recorder.board.block(
            self.recorder.rank,
            self.wait,
            group=self.group,
            seq=self.seq,
            channel=self.channel,
            text=waits_in(
                self.kind,
                seq=self.seq,
                peer=self.peer,
                tag=0 if self.channel is None else self.channel.tag,
                nbytes=self.bytes,
                members=self.members,
                world_size=self.recorder.board.world_size,
                group_name=self.group_name,
            ),
            where=self.where,
            limited=limited,
        )

    def unblock(self) -> None:
        """Show that the rank runs again."""
        self.recorder.board.unblock(self.recorder.rank)
        self.recorder.blocked.append((self._blocked_since, time.monotonic()))

    def over(self, end: float | None = None) -> None:
        """Log the operation as over."""
        if self.begun_in != self.recorder.given_up:
            return
        event = Event(
            self.recorder.rank,
            self.kind,
            self.members,
            self.peer,
            self.bytes,
            self.dtype,
            self.seq,
            self.start,
            time.monotonic() if end is None else end,
            self.where,
            self.group_name,
            self._waited,
            self.sent,
            0 if self.channel is None else self.channel.tag,
        )
        self._noted = self.recorder.note(event), event
        self.recorder.add_pending(-1)

    def note_waited(self) -> None:
        """Note that the rank waited for the operation or asked whether it is over.

        The rank may do so before or after the operation's end.
        """
        self._waited = True
        if self._noted is not None:
            at, event = self._noted
            events = self.recorder.events
            # The log of an earlier call is gone.
            if 0 <= at < len(events) and events[at] is event:
                events[at] = event._replace(waited=True)
                self._noted = at, events[at]
