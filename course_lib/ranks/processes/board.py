"""The board: what every rank is doing, in memory that all ranks and their parent share.

A rank writes its own part and reads the parts of the others. The parent reads all parts, and resets
the states between calls. So the parent can say what a rank was doing when it was killed, and a rank
can see, before it enters a collective, that another rank entered a different one.

There are no locks: every number is one aligned 64-bit word, written by one process. Only the short
texts can be read while they are being written. They are for people, and no decision is based on a
single reading.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

from course_lib.ranks.explain.mismatch import Splits
from course_lib.ranks.memory import anonymous_file
from course_lib.ranks.processes.board_views import (
    GroupView,
    Message,
    MessageChannel,
    RankPhase,
    RankView,
    Wait,
)

MAX_BOARD_RANKS = 64
MAX_GROUPS = 64
"""Process groups that one rank may use in one call."""
MAX_CHANNELS = 1024
"""Different (direction, peer, tag, group) that one rank may use for messages in one call."""
RING = 64
"""How many of its latest collectives a rank shows per group, and of its messages per channel."""

SIGNATURE, WHERE, TEXT = 96, 160, 256
"""Sizes of the texts in bytes: a collective's signature, a line of code, what a rank does."""
_Word = ctypes.c_uint64


class _Channel(ctypes.Structure):
    """Messages that one rank has started; `latest` holds words of `Message` objects."""

    _fields_: ClassVar = [("key", _Word), ("started", _Word), ("latest", _Word * RING)]


class _Entry(ctypes.Structure):
    """One collective that a rank has entered; of an all-to-all, the elements to and from each."""

    _fields_: ClassVar = [
        *[(name, _Word * MAX_BOARD_RANKS) for name in ("puts", "gets")],
        ("signature", ctypes.c_char * SIGNATURE),
        ("where", ctypes.c_char * WHERE),
    ]


class _Group(ctypes.Structure):
    """One process group of a rank; `members` is a bit mask."""

    _fields_: ClassVar = [
        *[(name, _Word) for name in ("key", "members", "entered")],
        ("latest", _Entry * RING),
    ]


class _Part(ctypes.Structure):
    """One rank's part of the board. In the tables, a key of 0 ends what is in use."""

    _fields_: ClassVar = [
        *[(name, _Word) for name in ("state", "changes", "wait", "group", "seq", "channel")],
        *[(name, _Word) for name in ("since", "pending", "mismatch", "given_up")],
        ("text", ctypes.c_char * TEXT),
        ("where", ctypes.c_char * WHERE),
        ("channels", _Channel * MAX_CHANNELS),
        ("groups", _Group * MAX_GROUPS),
    ]


class Board:
    """Shows what every rank does, to all ranks and their parent.

    ``Board.create(world_size)`` makes a board without a name in the file system. It disappears when
    the last process that maps it has ended, however that process ends.

    A process group has a *key*, which is the same on all its ranks. On each rank it also has a
    *slot*: the index at which that rank keeps it. `seq` numbers collectives and messages from 1.
    """

    def __init__(self, fd: int, world_size: int) -> None:
        self.fd = fd
        self.world_size = world_size
        size = ctypes.sizeof(_Part)
        if os.fstat(fd).st_size < size * world_size:
            os.ftruncate(fd, size * world_size)
        pages = mmap.mmap(fd, size * world_size)
        self._parts: list[Any] = [
            _Part.from_buffer(pages, size * rank) for rank in range(world_size)
        ]

    @classmethod
    def create(cls, world_size: int) -> Board:
        """Make a board of zeros for `world_size` ranks."""
        return cls(anonymous_file("board"), world_size)

    def close(self) -> None:
        """Unmap the board and close its file descriptor."""
        self._parts = []
        os.close(self.fd)

    # Places ----------------------------------------------------------------------------------

    def _channel(self, rank: int, channel: MessageChannel, create: bool = False) -> Any:
        """Return a channel of a rank; ``None`` if there is none."""
        key = channel.word()
        for entry in self._parts[rank].channels:
            if not entry.key:
                if not create:
                    return None
                entry.key = key
            if entry.key == key:
                return entry
        if not create:
            return None
        raise RuntimeError(
            f"a rank uses more than {MAX_CHANNELS} different tags and peers in one call; reuse "
            "tags: for example, take the step number modulo 8 as the tag"
        )

    def _group(self, rank: int, key: int) -> Any:
        """Return a group of a rank; ``None`` if it has not opened it."""
        return next((group for group in _used(self._parts[rank].groups) if group.key == key), None)

    # Writing ---------------------------------------------------------------------------------

    def set_state(self, rank: int, state: RankPhase) -> None:
        """Show what `rank` does now."""
        _write(self._parts[rank], text="", where="")
        self._change(rank, state, Wait.NOTHING)

    def set_all(self, state: RankPhase) -> None:
        """Show that all ranks are in `state`. The parent calls this between calls of the ranks."""
        for rank in range(self.world_size):
            self.set_state(rank, state)

    def give_up(self, call: int) -> None:
        """Tell all ranks to end call number `call`. The parent calls this; it cannot be undone."""
        for part in self._parts:
            part.given_up = call

    def block(
        self,
        rank: int,
        wait: Wait,
        *,
        group: int = 0,
        seq: int = 0,
        channel: MessageChannel | None = None,
        text: str = "",
        where: str = "",
        limited: bool = False,
    ) -> None:
        """Show that `rank` waits, in collective `seq` of `group` or message `seq` of `channel`."""
        part = self._parts[rank]
        _write(part, text=text, where=where)
        part.group, part.seq = group, seq
        part.channel = channel.word() if channel is not None else 0
        self._change(rank, RankPhase.LIMITED if limited else RankPhase.BLOCKED, wait)

    def unblock(self, rank: int) -> None:
        """Show that `rank` runs its own code again."""
        self._change(rank, RankPhase.RUNNING, Wait.NOTHING)

    def _change(self, rank: int, state: RankPhase, wait: Wait) -> None:
        part = self._parts[rank]
        part.since = time.monotonic_ns()
        part.wait = wait
        part.state = state
        part.changes += 1

    def start_message(self, rank: int, channel: MessageChannel, message: Message) -> int:
        """Count one more message that `rank` starts on `channel`; return its number, from 1."""
        entry = self._channel(rank, channel, create=True)
        seq: int = entry.started + 1
        entry.latest[seq % RING] = message.word()
        entry.started = seq
        return seq

    def see_mismatch(self, rank: int) -> None:
        """Show that `rank` has seen a mismatch between ranks, even if user code hides the error."""
        self._parts[rank].mismatch = 1

    def add_pending(self, rank: int, change: int) -> None:
        """Change the number of operations that `rank` has launched and that are not over."""
        part = self._parts[rank]
        part.pending = max(0, part.pending + change)
        part.changes += 1

    def open_group(self, rank: int, key: int, members: tuple[int, ...]) -> int:
        """Give `rank` a slot for a process group and return the slot."""
        for slot, group in enumerate(self._parts[rank].groups):
            if group.key == key:  # of an earlier call with unfinished operations
                return slot
            if not group.key:
                group.members = sum(1 << member for member in members)
                group.key = key
                return slot
        raise RuntimeError(
            f"a rank uses more than {MAX_GROUPS} process groups in one call; "
            "make the groups once and keep them, instead of making new groups in every step"
        )

    def enter_collective(
        self, rank: int, slot: int, signature: str, where: str, splits: Splits = ({}, {})
    ) -> int:
        """Show that `rank` enters its next collective of a group; return its number, from 1."""
        group = self._parts[rank].groups[slot]
        seq: int = group.entered + 1
        entry = group.latest[seq % RING]
        _write(entry, signature=signature, where=where)
        for place, counts in zip((entry.puts, entry.gets), splits, strict=True):
            for other, count in counts.items():
                place[other] = count
        group.entered = seq
        return seq

    def clear(self) -> None:
        """Remove the groups and channels of the last call. The parent calls this between calls."""
        for part in self._parts:
            for channel in _used(part.channels):
                channel.key = channel.started = 0
            for group in _used(part.groups):
                group.key = group.entered = 0
            part.pending = part.mismatch = 0

    # Taking back, and reading ----------------------------------------------------------------

    def take_back_collective(self, rank: int, slot: int) -> None:
        """Count one collective less, because `rank` has given up the last one that it entered."""
        self._parts[rank].groups[slot].entered -= 1

    def take_back_message(self, rank: int, channel: MessageChannel) -> None:
        """Count one message less: `rank` does not go on with its last one on `channel`."""
        if (entry := self._channel(rank, channel)) is not None:
            entry.started -= 1

    def count(self, rank: int, channel: MessageChannel) -> int:
        """Return how many messages `rank` has started on `channel`."""
        entry = self._channel(rank, channel)
        return 0 if entry is None else int(entry.started)

    def message(self, rank: int, channel: MessageChannel, seq: int) -> Message | None:
        """Return message `seq` of `rank` on `channel`; ``None`` if the board does not show it."""
        entry = self._channel(rank, channel)
        if entry is None or not 0 <= entry.started - seq < RING:
            return None
        return Message.of(entry.latest[seq % RING])

    def collective(self, rank: int, key: int, seq: int) -> tuple[str, str] | None:
        """Return (signature, line) of a group's collective `seq` on `rank`, or ``None``.

        It is ``None`` if the board does not show the collective.
        """
        group = self._group(rank, key)
        if group is None or not 0 <= group.entered - seq < RING:
            return None
        return _entry(group, seq)

    def splits(self, rank: int, key: int, seq: int) -> Splits:
        """Return the splits of a group's all-to-all `seq` on `rank`, which the board shows."""
        return _splits(self._group(rank, key), seq)

    def collectives_entered(self, rank: int, key: int) -> int:
        """Return how many collectives of a group `rank` has entered."""
        group = self._group(rank, key)
        return 0 if group is None else int(group.entered)

    def given_up(self, rank: int) -> int:
        """Return the number of the latest call that `rank` must end; 0 if there was none."""
        return int(self._parts[rank].given_up)

    def pending(self) -> int:
        """Return how many operations of all ranks were launched and are not over."""
        return sum(part.pending for part in self._parts)

    def views(self) -> list[RankView]:
        """Return every rank's part, in rank order."""
        return [self.view(rank) for rank in range(self.world_size)]

    def view(self, rank: int) -> RankView:
        """Return `rank`'s part of the board as plain values."""
        part = self._parts[rank]
        # The state is read first: if the rank has finished, all counters read later are final.
        state, wait = RankPhase(part.state), Wait(part.wait)
        channels = {MessageChannel.of(channel.key): channel for channel in _used(part.channels)}
        message = MessageChannel.of(part.channel) if wait in (Wait.SEND, Wait.RECV) else None
        return RankView(
            rank=rank,
            state=state,
            changes=part.changes,
            wait=wait,
            group=part.group,
            seq=part.seq,
            channel=message,
            since=part.since / 1e9,
            pending=part.pending,
            text=_text(part.text),
            where=_text(part.where),
            channels={key: int(channel.started) for key, channel in channels.items()},
            groups={
                int(group.key): GroupView(
                    members=tuple(r for r in range(self.world_size) if group.members >> r & 1),
                    entered=group.entered,
                    read_latest=partial(_collectives, group, group.entered),
                    read_splits=partial(_splits, group),
                )
                for group in _used(part.groups)
            },
            saw_mismatch=bool(part.mismatch),
            read_messages=lambda channel: _messages(channels[channel]),
        )


def _used(table: Any) -> Iterator[Any]:
    """Yield the entries of a table of channels or groups that are in use."""
    for entry in table:
        if not entry.key:
            return
        yield entry


def _write(place: Any, **texts: str) -> None:
    """Write texts. A long one loses its beginning: the end of a path tells more."""
    for name, text in texts.items():
        setattr(place, name, text.encode("utf-8", "replace")[-getattr(type(place), name).size :])


def _text(data: bytes) -> str:
    text = data.decode("utf-8", "replace")
    return text if text.isprintable() else "".join(c if c.isprintable() else "�" for c in text)


def _latest(count: int) -> range:
    """Return the numbers of the latest collectives or messages that are shown."""
    return range(max(1, count - RING + 1), count + 1)


def _messages(channel: Any) -> dict[int, Message]:
    return {seq: Message.of(channel.latest[seq % RING]) for seq in _latest(channel.started)}


def _collectives(group: Any, entered: int) -> dict[int, tuple[str, str]]:
    return {seq: _entry(group, seq) for seq in _latest(entered)}


def _entry(group: Any, seq: int) -> tuple[str, str]:
    entry = group.latest[seq % RING]
    return _text(entry.signature), _text(entry.where)


def _splits(group: Any, seq: int) -> Splits:
    entry = group.latest[seq % RING]
    return dict(enumerate(entry.puts)), dict(enumerate(entry.gets))
