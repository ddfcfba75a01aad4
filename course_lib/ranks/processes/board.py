"""The board: what every rank is doing, in memory that all ranks and their parent share.

A rank writes its own part and reads the parts of the others. The parent reads all parts, and resets
the states between calls. So the parent can say what a rank was doing when it was killed, and a rank
can see, before it enters a collective, that another rank entered a different one.

There are no locks: every number is one aligned 64-bit word, written by one process. Only the short
texts can be read while they are being written. They are for people, and no decision is based on a
single reading.

The parent need not trust the ranks: it reads the board only as bounded numbers and bounded text,
never as objects.
"""

from __future__ import annotations

import mmap
import os
import time
from functools import partial

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
ENTRY = SIGNATURE + WHERE
# Positions of the words in the head.
STATE, CHANGES, WAIT, GROUP, SEQ, CHANNEL, SINCE, PENDING, MISMATCH, GIVEN_UP = range(10)
HEAD = 10
CHANNEL_WORDS = 2 + RING  # key, number of messages started, properties of the latest messages
GROUP_HEAD = 3  # key, members as a bit mask, number of collectives entered


class Pages:
    """A file of fixed layout, mapped into the parent and into every rank."""

    def __init__(self, fd: int, world_size: int) -> None:
        if not 1 <= world_size <= MAX_BOARD_RANKS:
            raise ValueError(f"world_size must be 1 to {MAX_BOARD_RANKS}, got {world_size}")
        self.fd = fd
        self.world_size = world_size
        self._groups_at = 8 * (HEAD + MAX_CHANNELS * CHANNEL_WORDS)
        self._group_size = 8 * GROUP_HEAD + RING * ENTRY
        self._text_at = self._groups_at + MAX_GROUPS * self._group_size
        self._stride = self._text_at + TEXT + WHERE
        size = self._stride * world_size
        if os.fstat(fd).st_size < size:
            os.ftruncate(fd, size)
        self._map = mmap.mmap(fd, size)
        self._bytes = memoryview(self._map)
        self._words = self._bytes[: size // 8 * 8].cast("Q")
        # Where each rank's part and texts begin, computed once: every call needs it several times.
        self._heads = range(0, self._stride // 8 * world_size, self._stride // 8)
        self._texts = range(self._text_at, self._text_at + size, self._stride)
        self._channel_at: dict[tuple[int, int], int] = {}
        self._seen: dict[int, int] = {}  # rank → how many of its channels are in `_found`

    def close(self) -> None:
        """Unmap the board and close its file descriptor; closing again does nothing."""
        if self._map.closed:
            return  # the descriptor's number may belong to another file by now
        self._words.release()
        self._bytes.release()
        self._map.close()
        os.close(self.fd)

    def _group(self, rank: int, slot: int) -> int:
        return rank * self._stride + self._groups_at + slot * self._group_size

    def _find_group(self, rank: int, key: int) -> int | None:
        for slot in range(MAX_GROUPS):
            word = self._group(rank, slot) // 8
            if self._words[word] == key:
                return word
            if self._words[word] == 0:
                return None
        return None

    def _channel(self, rank: int, key: int, create: bool = False) -> int:
        """Return the first word of a channel; 0 if there is none."""
        if (known := self._channel_at.get((rank, key))) is not None:
            return known
        slot = self._seen.get(rank, 0)
        while slot < MAX_CHANNELS:
            word = rank * self._stride // 8 + HEAD + slot * CHANNEL_WORDS
            there = self._words[word]
            if there == 0:
                if not create:
                    return 0
                self._words[word] = there = key
            self._channel_at[rank, there] = word
            self._seen[rank] = slot = slot + 1
            if there == key:
                return word
        if not create:
            return 0
        raise RuntimeError(
            f"a rank uses more than {MAX_CHANNELS} different tags and peers in one call; reuse "
            "tags: for example, take the step number modulo 8 as the tag"
        )

    def forget_places(self) -> None:
        """Forget where channels are. A rank does so before each call: `clear` may have run."""
        self._channel_at.clear()
        self._seen.clear()

    def _clear_places(self, rank: int) -> None:
        first = rank * self._stride // 8 + HEAD
        for word in range(first, first + MAX_CHANNELS * CHANNEL_WORDS, CHANNEL_WORDS):
            if self._words[word] == 0:
                break
            self._words[word] = self._words[word + 1] = 0
        for slot in range(MAX_GROUPS):
            word = self._group(rank, slot) // 8
            if self._words[word] == 0:
                break
            self._words[word] = self._words[word + 2] = 0

    def _latest(self, group_at: int, entered: int) -> dict[int, tuple[str, str]]:
        shown = range(max(1, entered - RING + 1), entered + 1)
        return {seq: self._entry(group_at, seq) for seq in shown}

    def _entry(self, group_at: int, seq: int) -> tuple[str, str]:
        entry = group_at + 8 * GROUP_HEAD + (seq % RING) * ENTRY
        return self._read_text(entry, SIGNATURE), self._read_text(entry + SIGNATURE, WHERE)

    def _write_texts(self, rank: int, text: str, where: str) -> None:
        at = self._texts[rank]
        if not text and not where:  # the usual case
            self._bytes[at] = self._bytes[at + TEXT] = 0
            return
        self._write_text(at, text, TEXT)
        self._write_text(at + TEXT, where, WHERE)

    def _write_text(self, at: int, text: str, size: int) -> None:
        # A long text loses its beginning: the end of a path tells more.
        if not text:  # the usual case
            self._bytes[at] = 0
            return
        data = text.encode("utf-8", "replace")[-size:]
        self._bytes[at : at + size] = data.ljust(size, b"\0")

    def _read_text(self, at: int, size: int) -> str:
        if not self._bytes[at]:  # the usual case: no text
            return ""
        text = bytes(self._bytes[at : at + size]).rstrip(b"\0").decode("utf-8", "replace")
        if text.isprintable():
            return text
        return "".join(c if c.isprintable() else "�" for c in text)


_PHASES = {int(phase): phase for phase in RankPhase}
_WAITS = {int(wait): wait for wait in Wait}


class Board(Pages):
    """Shows what every rank does, to all ranks and their parent.

    ``Board.create(world_size)`` makes a board without a name in the file system. It disappears when
    the last process that maps it has ended, however that process ends.

    A process group has a *key*, which is the same on all its ranks. On each rank it also has a
    *slot*: the index at which that rank keeps it. `seq` numbers collectives and messages from 1.
    """

    @classmethod
    def create(cls, world_size: int) -> Board:
        """Make a board of zeros for `world_size` ranks."""
        return cls(anonymous_file("board"), world_size)

    # Writing ---------------------------------------------------------------------------------

    def set_state(self, rank: int, state: RankPhase, text: str = "", where: str = "") -> None:
        """Show what `rank` does now."""
        self._write_texts(rank, text, where)
        self._change(rank, state, Wait.NOTHING)

    def set_all(self, state: RankPhase) -> None:
        """Show that all ranks are in `state`. The parent calls this between calls of the ranks."""
        words, number, now = self._words, int(state), time.monotonic_ns()
        for word, text in zip(self._heads, self._texts, strict=True):
            self._bytes[text] = self._bytes[text + TEXT] = 0
            words[word + SINCE] = now
            words[word + WAIT] = 0
            words[word + STATE] = number
            words[word + CHANGES] += 1

    def give_up(self, call: int) -> None:
        """Tell all ranks to end call number `call`. The parent calls this; it cannot be undone."""
        for word in self._heads:
            self._words[word + GIVEN_UP] = call

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
        self._write_texts(rank, text, where)
        word = rank * self._stride // 8
        self._words[word + GROUP] = group
        self._words[word + SEQ] = seq
        self._words[word + CHANNEL] = channel.word() if channel is not None else 0
        self._change(rank, RankPhase.LIMITED if limited else RankPhase.BLOCKED, wait)

    def unblock(self, rank: int) -> None:
        """Show that `rank` runs its own code again."""
        self._change(rank, RankPhase.RUNNING, Wait.NOTHING)

    def start_message(self, rank: int, channel: MessageChannel, what: Message) -> int:
        """Count one more message that `rank` starts on `channel`; return its number, from 1."""
        word = self._channel(rank, channel.word(), create=True)
        seq = self._words[word + 1] + 1
        self._words[word + 2 + seq % RING] = what.word()
        self._words[word + 1] = seq
        return seq

    def see_mismatch(self, rank: int) -> None:
        """Show that `rank` has seen a mismatch between ranks, even if user code hides the error."""
        self._words[rank * self._stride // 8 + MISMATCH] = 1

    def add_pending(self, rank: int, change: int) -> None:
        """Change the number of operations that `rank` has launched and that are not over."""
        word = rank * self._stride // 8
        self._words[word + PENDING] = max(0, self._words[word + PENDING] + change)
        self._words[word + CHANGES] += 1

    def open_group(self, rank: int, key: int, members: tuple[int, ...]) -> int:
        """Give `rank` a slot for a process group and return the slot."""
        for slot in range(MAX_GROUPS):
            word = self._group(rank, slot) // 8
            if self._words[word] == key:  # of an earlier call with unfinished operations
                return slot
            if self._words[word] == 0:
                self._words[word + 1] = sum(1 << member for member in members)
                self._words[word] = key
                return slot
        raise RuntimeError(
            f"a rank uses more than {MAX_GROUPS} process groups in one call; "
            "make the groups once and keep them, instead of making new groups in every step"
        )

    def enter_collective(self, rank: int, slot: int, signature: str, where: str) -> int:
        """Show that `rank` enters its next collective of a group; return its number, from 1."""
        at = self._group(rank, slot)
        seq = self._words[at // 8 + 2] + 1
        entry = at + 8 * GROUP_HEAD + (seq % RING) * ENTRY
        self._write_text(entry, signature, SIGNATURE)
        self._write_text(entry + SIGNATURE, where, WHERE)
        self._words[at // 8 + 2] = seq
        return seq

    def clear(self) -> None:
        """Remove the groups and channels of the last call. The parent calls this between calls.

        Every rank must then call `forget_places` before it writes again.
        """
        for rank in range(self.world_size):
            self._clear_places(rank)
            word = rank * self._stride // 8
            self._words[word + PENDING] = self._words[word + MISMATCH] = 0

    # Taking back, and reading ----------------------------------------------------------------

    def take_back_collective(self, rank: int, slot: int) -> None:
        """Count one collective less, because `rank` has given up the last one that it entered."""
        self._words[self._group(rank, slot) // 8 + 2] -= 1

    def take_back_message(self, rank: int, channel: MessageChannel) -> None:
        """Count one message less: `rank` does not go on with its last one on `channel`."""
        if word := self._channel(rank, channel.word()):
            self._words[word + 1] -= 1

    def count(self, rank: int, channel: MessageChannel) -> int:
        """Return how many messages `rank` has started on `channel`."""
        word = self._channel(rank, channel.word())
        return self._words[word + 1] if word else 0

    def message(self, rank: int, channel: MessageChannel, seq: int) -> Message | None:
        """Return message `seq` of `rank` on `channel`; ``None`` if the board does not show it."""
        word = self._channel(rank, channel.word())
        if not word or not 0 <= self._words[word + 1] - seq < RING:
            return None
        return Message.of(self._words[word + 2 + seq % RING])

    def collective(self, rank: int, key: int, seq: int) -> tuple[str, str] | None:
        """Return (signature, line) of a group's collective `seq` on `rank`, or ``None``.

        It is ``None`` if the board does not show the collective.
        """
        word = self._find_group(rank, key)
        if word is None or not 0 <= self._words[word + 2] - seq < RING:
            return None
        return self._entry(8 * word, seq)

    def collectives_entered(self, rank: int, key: int) -> int:
        """Return how many collectives of a group `rank` has entered."""
        word = self._find_group(rank, key)
        return 0 if word is None else self._words[word + 2]

    def given_up(self, rank: int) -> int:
        """Return the number of the latest call that `rank` must end; 0 if there was none."""
        return self._words[rank * self._stride // 8 + GIVEN_UP]

    def pending(self) -> int:
        """Return how many operations of all ranks were launched and are not over."""
        return sum(
            self._words[rank * self._stride // 8 + PENDING] for rank in range(self.world_size)
        )

    def untouched(self) -> bool:
        """Return whether no rank has communicated since the board was cleared."""
        words, to_groups = self._words, self._groups_at // 8
        for word in self._heads:
            if words[word + HEAD] or words[word + to_groups] or words[word + PENDING]:
                return False
        return True

    def views(self) -> list[RankView]:
        """Return every rank's part, in rank order."""
        return [self.view(rank) for rank in range(self.world_size)]

    def view(self, rank: int) -> RankView:
        """Return `rank`'s part of the board as plain values."""
        base = rank * self._stride
        # The state is read first: if the rank has finished, all counters read later are final.
        head = self._words[base // 8 : base // 8 + HEAD].tolist()
        wait = _WAITS.get(head[WAIT], Wait.NOTHING)
        channels, latest = {}, {}
        for slot in range(MAX_CHANNELS):
            word = base // 8 + HEAD + slot * CHANNEL_WORDS
            if self._words[word] == 0:
                break
            channel = MessageChannel.of(self._words[word])
            if channel.peer < self.world_size:
                channels[channel] = self._words[word + 1]
                latest[channel] = word
        groups = {}
        for slot in range(MAX_GROUPS):
            at = self._group(rank, slot)
            key, members, entered = self._words[at // 8 : at // 8 + 3].tolist()
            if key == 0:
                break
            groups[key] = GroupView(
                members=tuple(r for r in range(self.world_size) if members >> r & 1),
                entered=entered,
                read_latest=partial(self._latest, at, entered),
            )
        message = MessageChannel.of(head[CHANNEL]) if wait in (Wait.SEND, Wait.RECV) else None
        if message is not None and message.peer >= self.world_size:
            message = None
        return RankView(
            rank=rank,
            state=_PHASES.get(head[STATE], RankPhase.RUNNING),
            changes=head[CHANGES],
            wait=wait,
            group=head[GROUP],
            seq=head[SEQ],
            channel=message,
            since=head[SINCE] / 1e9,
            pending=head[PENDING],
            text=self._read_text(base + self._text_at, TEXT),
            where=self._read_text(base + self._text_at + TEXT, WHERE),
            channels=channels,
            groups=groups,
            saw_mismatch=bool(head[MISMATCH]),
            read_messages=lambda channel: self._messages(latest[channel]),
        )

    def _messages(self, word: int) -> dict[int, Message]:
        count = self._words[word + 1]
        shown = range(max(1, count - RING + 1), count + 1)
        return {seq: Message.of(self._words[word + 2 + seq % RING]) for seq in shown}

    def _change(self, rank: int, state: RankPhase, wait: Wait) -> None:
        word = rank * self._stride // 8
        self._words[word + SINCE] = time.monotonic_ns()
        self._words[word + WAIT] = wait
        self._words[word + STATE] = state
        self._words[word + CHANGES] += 1
