"""A rank's notes about its communication: on the board, and one `Event` per operation in its log.

`RankRecorder` writes all that its rank shows on the board, but for the beginning and the end of a
call, which the rank's worker shows.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from course_lib.ranks.explain.errors import CollectiveMismatch
from course_lib.ranks.explain.mismatch import Splits, differing, differing_splits
from course_lib.ranks.explain.waiting import operation_in_words
from course_lib.ranks.explain.words import spans
from course_lib.ranks.processes.board import SIGNATURE, Board
from course_lib.ranks.processes.board_views import (
    NEW_GROUPS,
    Message,
    MessageChannel,
    RankPhase,
    Wait,
)
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
    """Shared by the process groups of one rank: its part of the board, and the log of the call."""

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
    given_up: int = 0
    """How many calls were given up. Operations that began before are not logged at their end."""
    _slots: dict[int, int] = field(default_factory=dict)
    """Key of a group → its slot on the board in this call."""
    _kept: deque[tuple[Any, int]] = field(default_factory=deque)
    _kept_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _launched: threading.Event = field(default_factory=threading.Event)
    _watching: threading.Thread | None = None

    def slot(self, key: int, members: tuple[int, ...]) -> int:
        """Return a group's slot on the board in this call."""
        if key not in self._slots:
            self._slots[key] = self.board.open_group(self.rank, key, members)
        return self._slots[key]

    def enter(
        self,
        key: int,
        members: tuple[int, ...],
        signature: str,
        line: str,
        limited: bool = False,
        splits: Splits | None = None,
    ) -> int:
        """Show that this rank enters the next collective of a group; return its number, from 1.

        `limited`: whether it will go on by itself; that must be seen as early as the number.
        `splits`: of an all-to-all.

        Raises:
            CollectiveMismatch: another member has entered something different under this number.

        """
        board, signature = self.board, signature[:SIGNATURE]
        if limited:
            board.set_state(self.rank, RankPhase.LIMITED)
        slot = self.slot(key, members)
        seq = board.enter_collective(self.rank, slot, signature, line, splits or ({}, {}))
        difference, entered = "", {self.rank: splits} if splits else {}
        for other in members:
            entry = board.collective(other, key, seq) if other != self.rank else None
            if entry is None:
                continue
            if entry[0] != signature:
                call = f"collective #{seq} of this group"
                difference = (
                    f"{f'new_group #{seq}' if key == NEW_GROUPS else call} is '{signature}' on "
                    f"rank {self.rank} but '{entry[0]}' on rank {other} ({entry[1]})"
                )
                break
            if splits:
                entered[other] = board.splits(other, key, seq)
        if difference := difference or differing_splits(entered):
            board.see_mismatch(self.rank)
            board.unblock(self.rank)
            raise CollectiveMismatch(difference)
        return seq

    def enter_new_group(self, ranks: Collection[int] | None) -> None:
        """Show that this rank makes a group of `ranks`, which all ranks must make; None: of all."""
        everyone = tuple(range(self.board.world_size))
        members = spans(sorted(ranks or everyone))
        self.enter(NEW_GROUPS, everyone, f"new_group of ranks {members}", self.locate())

    @contextmanager
    def connecting(self, key: int, members: tuple[int, ...]) -> Iterator[None]:
        """Show that this rank waits until all members of a new group make it."""
        self.slot(key, members)
        text = f"waits in new_group of ranks {spans(members)}"
        self.board.block(self.rank, Wait.COLLECTIVE, group=key, text=text, where=self.locate())
        try:
            yield
        finally:
            self.board.unblock(self.rank)

    def start_message(self, channel: MessageChannel, message: Message) -> int:
        """Show that this rank starts a message; return its number on the channel, from 1.

        Raises:
            CollectiveMismatch: the other side has started something different.

        """
        seq = self.board.start_message(self.rank, channel, message)
        peer_message = self.board.message(channel.peer, channel.other_end(self.rank), seq)
        if peer_message is not None and peer_message != message:
            self.board.see_mismatch(self.rank)
            own_side = self.rank, (message.numel, message.dtype)
            peer_side = channel.peer, (peer_message.numel, peer_message.dtype)
            sides = (*own_side, *peer_side) if channel.sends else (*peer_side, *own_side)
            raise CollectiveMismatch(differing(*sides))
        return seq

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
        self._slots.clear()
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
    event: Event
    """What the log will have of it; its end is not known yet."""
    wait: Wait
    group: int
    """Key of the process group on the board."""
    channel: MessageChannel | None = None
    _blocked_since: float = 0.0
    _logged_at: int = -1
    """Index of the event in the log; -1 while it is not there."""

    def __post_init__(self) -> None:
        self._begun_in = self.recorder.given_up

    def launched(self) -> None:
        """Count the operation as under way."""
        self.recorder.add_pending(1)

    def take_back(self, broken: bool = False) -> None:
        """Count the operation as not begun: it was refused, or its own time limit is over.

        `broken`: whether gloo cannot use its connections again.
        """
        board, rank = self.recorder.board, self.event.rank
        self.recorder.add_pending(-1)
        self.recorder.broken |= broken
        if self.channel is not None:
            board.take_back_message(rank, self.channel)
        else:
            board.take_back_collective(rank, self.recorder.slot(self.group, self.event.group))

    def arrived(self) -> bool:
        """Return whether all other ranks that it needs have started it, too."""
        board, rank, seq = self.recorder.board, self.event.rank, self.event.seq
        if self.channel is not None:
            return board.count(self.channel.peer, self.channel.other_end(rank)) >= seq
        other_members = (member for member in self.event.group if member != rank)
        return all(board.collectives_entered(other, self.group) >= seq for other in other_members)

    def block(self, limited: bool = False) -> None:
        """Show that the rank waits until this operation, or its own time limit, is over."""
        self._blocked_since = time.monotonic()
        event, board = self.event, self.recorder.board
        description = operation_in_words(
            event.kind,
            seq=event.seq,
            peer=event.peer,
            tag=event.tag,
            nbytes=event.bytes,
            members=event.group,
            world_size=board.world_size,
            group_name=event.group_name,
        )
        board.block(
            event.rank,
            self.wait,
            group=self.group,
            seq=event.seq,
            channel=self.channel,
            text=f"waits in {description}",
            where=event.where,
            limited=limited,
        )

    def unblock(self) -> None:
        """Show that the rank runs again."""
        self.recorder.board.unblock(self.event.rank)
        self.recorder.blocked.append((self._blocked_since, time.monotonic()))

    def over(self) -> None:
        """Log the operation as over, unless it was given up with its call."""
        if self._begun_in == self.recorder.given_up:
            self.event = self.event._replace(end=time.monotonic())
            self._logged_at = self.recorder.note(self.event)
            self.recorder.add_pending(-1)

    def note_waited(self) -> None:
        """Note that the rank waited for the operation or asked whether it is over.

        The rank may do so before or after the operation's end.
        """
        before, self.event = self.event, self.event._replace(waited=True)
        events, at = self.recorder.events, self._logged_at
        if 0 <= at < len(events) and events[at] is before:  # else the log is of a later call
            events[at] = self.event
