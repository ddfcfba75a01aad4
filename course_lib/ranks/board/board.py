"""The board: what every rank is doing, in memory that all ranks and their parent share.

A rank writes its own part and reads the others'; the parent reads, and between calls resets the
states. Nothing is locked: every number is one aligned 64-bit word, written by one process. So the
parent can say what a rank was doing when it was killed, and a rank can see, before it enters a
collective, that another rank entered a different one. Only the short texts can be read while they
are being written; they are for people, and a decision is never based on one look.

The parent need not trust the ranks: whatever stands on the board is read as bounded numbers and
bounded text, never as objects.
"""

from __future__ import annotations

import time
from functools import partial

from course_lib.ranks.board import pages
from course_lib.ranks.board.pages import MAX_CHANNELS, MAX_GROUPS, RING, Pages
from course_lib.ranks.board.views import Channel, GroupView, Message, RankPhase, RankView, Wait
from course_lib.ranks.memory import anonymous_file

_PHASES = {int(phase): phase for phase in RankPhase}
_WAITS = {int(wait): wait for wait in Wait}


class Board(Pages):
    """What every rank does, for all ranks and their parent.

    ``Board.create(world_size)`` makes one without a name in the file system: it is gone when the
    last process that maps it is gone, however that process ends.

    A process group has a *key*, which is the same on all its ranks, and on each rank a *slot*: the
    number of the place where that rank keeps it. `seq` numbers collectives and messages from 1.
    """

    @classmethod
    def create(cls, world_size: int) -> Board:
        """Make a board of zeros for `world_size` ranks."""
        return cls(anonymous_file("board"), world_size)

    # A rank writes ---------------------------------------------------------------------------

    def set_state(self, rank: int, state: RankPhase, text: str = "", where: str = "") -> None:
        """Say what `rank` does now."""
        self._write_texts(rank, text, where)
        self._change(rank, state, Wait.NOTHING)

    def set_all(self, state: RankPhase) -> None:
        """Say that all ranks are in `state`: between calls, by the parent."""
        words, number, now = self._words, int(state), time.monotonic_ns()
        for word, text in zip(self._heads, self._texts, strict=True):
            self._bytes[text] = self._bytes[text + pages.TEXT] = 0
            words[word + pages.SINCE] = now
            words[word + pages.WAIT] = 0
            words[word + pages.STATE] = number
            words[word + pages.CHANGES] += 1

    def give_up(self, call: int) -> None:
        """Say that all ranks shall end the call of this number: by the parent, for good."""
        for word in self._heads:
            self._words[word + pages.GIVEN_UP] = call

    def block(
        self,
        rank: int,
        wait: Wait,
        *,
        group: int = 0,
        seq: int = 0,
        channel: Channel | None = None,
        text: str = "",
        where: str = "",
    ) -> None:
        """Say that `rank` waits: in collective `seq` of `group`, or message `seq` of `channel`."""
        self._write_texts(rank, text, where)
        word = rank * self._stride // 8
        self._words[word + pages.GROUP] = group
        self._words[word + pages.SEQ] = seq
        self._words[word + pages.CHANNEL] = channel.word() if channel is not None else 0
        self._change(rank, RankPhase.BLOCKED, wait)

    def unblock(self, rank: int) -> None:
        """Say that `rank` runs its own code again."""
        self._change(rank, RankPhase.RUNNING, Wait.NOTHING)

    def start_message(self, rank: int, channel: Channel, what: Message) -> int:
        """Count one more message that `rank` starts on `channel`; return its number, from 1."""
        word = self._channel(rank, channel.word(), create=True)
        seq = self._words[word + 1] + 1
        self._words[word + 2 + seq % RING] = what.word()
        self._words[word + 1] = seq
        return seq

    def see_mismatch(self, rank: int) -> None:
        """Say that `rank` has seen that the ranks do not fit together, whatever it does then."""
        self._words[rank * self._stride // 8 + pages.MISMATCH] = 1

    def add_pending(self, rank: int, change: int) -> None:
        """Count operations that were launched and are not over."""
        word = rank * self._stride // 8
        self._words[word + pages.PENDING] = max(0, self._words[word + pages.PENDING] + change)
        self._words[word + pages.CHANGES] += 1

    def open_group(self, rank: int, key: int, members: tuple[int, ...]) -> int:
        """Give `rank` a place for a process group and return its number."""
        for slot in range(MAX_GROUPS):
            word = self._group(rank, slot) // 8
            if self._words[word] == key:  # of an earlier call that is not over
                return slot
            if self._words[word] == 0:
                self._words[word + 1] = sum(1 << member for member in members)
                self._words[word] = key
                return slot
        raise RuntimeError(
            f"a rank uses more than {MAX_GROUPS} process groups in one call; "
            "make them once and keep them, instead of a new one per step"
        )

    def enter_collective(self, rank: int, slot: int, signature: str, where: str) -> int:
        """Show that `rank` enters its next collective of a group; return its number, from 1."""
        at = self._group(rank, slot)
        seq = self._words[at // 8 + 2] + 1
        entry = at + 8 * pages.GROUP_HEAD + (seq % RING) * pages.ENTRY
        self._write_text(entry, signature, pages.SIGNATURE)
        self._write_text(entry + pages.SIGNATURE, where, pages.WHERE)
        self._words[at // 8 + 2] = seq
        return seq

    def clear(self) -> None:
        """Forget the groups and channels of the last call: between calls, by the parent.

        Every rank then calls `forget_places` before it writes again.
        """
        for rank in range(self.world_size):
            self._clear_places(rank)
            word = rank * self._stride // 8
            self._words[word + pages.PENDING] = self._words[word + pages.MISMATCH] = 0

    # Anyone reads ----------------------------------------------------------------------------

    def take_back_message(self, rank: int, channel: Channel) -> None:
        """Count one message less: the last that `rank` started on `channel` was refused."""
        if word := self._channel(rank, channel.word()):
            self._words[word + 1] -= 1

    def count(self, rank: int, channel: Channel) -> int:
        """Return how many messages `rank` has started on `channel`."""
        word = self._channel(rank, channel.word())
        return self._words[word + 1] if word else 0

    def message(self, rank: int, channel: Channel, seq: int) -> Message | None:
        """Return what message `seq` of `rank` on `channel` is, if it shows it."""
        word = self._channel(rank, channel.word())
        if not word or not 0 <= self._words[word + 1] - seq < RING:
            return None
        return Message.of(self._words[word + 2 + seq % RING])

    def collective(self, rank: int, key: int, seq: int) -> tuple[str, str] | None:
        """Return (signature, line) of collective `seq` of `rank` in the group, if it shows it."""
        word = self._find_group(rank, key)
        if word is None or not 0 <= self._words[word + 2] - seq < RING:
            return None
        return self._entry(8 * word, seq)

    def given_up(self, rank: int) -> int:
        """Return the number of the latest call that `rank` shall end; 0 if there was none."""
        return self._words[rank * self._stride // 8 + pages.GIVEN_UP]

    def changes(self) -> tuple[int, ...]:
        """Return how often each rank has changed its part: equal twice means nothing happened."""
        return tuple(
            self._words[rank * self._stride // 8 + pages.CHANGES] for rank in range(self.world_size)
        )

    def pending(self) -> int:
        """Return how many operations of all ranks were launched and are not over."""
        return sum(
            self._words[rank * self._stride // 8 + pages.PENDING] for rank in range(self.world_size)
        )

    def untouched(self) -> bool:
        """Return whether no rank has communicated since the board was cleared."""
        words, to_groups = self._words, self._groups_at // 8
        for word in self._heads:
            if words[word + pages.HEAD] or words[word + to_groups] or words[word + pages.PENDING]:
                return False
        return True

    def views(self) -> list[RankView]:
        """Return every rank's part, in rank order."""
        return [self.view(rank) for rank in range(self.world_size)]

    def view(self, rank: int) -> RankView:
        """Return `rank`'s part of the board as plain values."""
        base = rank * self._stride
        # The state is read first: of a rank that has finished, every counter is final.
        head = self._words[base // 8 : base // 8 + pages.HEAD].tolist()
        wait = _WAITS.get(head[pages.WAIT], Wait.NOTHING)
        channels, latest = {}, {}
        for slot in range(MAX_CHANNELS):
            word = base // 8 + pages.HEAD + slot * pages.CHANNEL_WORDS
            if self._words[word] == 0:
                break
            channel = Channel.of(self._words[word])
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
        message = Channel.of(head[pages.CHANNEL]) if wait in (Wait.SEND, Wait.RECV) else None
        if message is not None and message.peer >= self.world_size:
            message = None
        return RankView(
            rank=rank,
            state=_PHASES.get(head[pages.STATE], RankPhase.RUNNING),
            changes=head[pages.CHANGES],
            wait=wait,
            group=head[pages.GROUP],
            seq=head[pages.SEQ],
            channel=message,
            since=head[pages.SINCE] / 1e9,
            pending=head[pages.PENDING],
            text=self._read_text(base + self._text_at, pages.TEXT),
            where=self._read_text(base + self._text_at + pages.TEXT, pages.WHERE),
            channels=channels,
            groups=groups,
            saw_mismatch=bool(head[pages.MISMATCH]),
            read_messages=lambda channel: self._messages(latest[channel]),
        )

    def _messages(self, word: int) -> dict[int, Message]:
        count = self._words[word + 1]
        shown = range(max(1, count - RING + 1), count + 1)
        return {seq: Message.of(self._words[word + 2 + seq % RING]) for seq in shown}

    def _change(self, rank: int, state: RankPhase, wait: Wait) -> None:
        word = rank * self._stride // 8
        self._words[word + pages.SINCE] = time.monotonic_ns()
        self._words[word + pages.WAIT] = wait
        self._words[word + pages.STATE] = state
        self._words[word + pages.CHANGES] += 1
