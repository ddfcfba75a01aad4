"""The board as plain values: one `RankView` per rank, at one moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

from course_lib.ranks.explain.mismatch import Splits

NEW_GROUPS = (1 << 33) - 1
"""Key of a pseudo group, whose collectives are the calls of ``dist.new_group``: no rank waits for
them, but all ranks must make the same calls."""


class RankPhase(IntEnum):
    """The state of a rank."""

    STARTING = 0
    IDLE = 1
    RUNNING = 2
    BLOCKED = 3
    FINISHED = 4
    RAISED = 5
    LIMITED = 6
    """Blocked, but not for ever: its operation has its own time limit."""


class Wait(IntEnum):
    """The operation that a blocked rank waits in."""

    NOTHING = 0
    COLLECTIVE = 1
    SEND = 2
    RECV = 3


@dataclass(frozen=True)
class GroupView:
    """One process group as one rank sees it: its members and how many collectives it entered."""

    members: tuple[int, ...]
    entered: int
    read_latest: Callable[[], dict[int, tuple[str, str]]] = dict
    read_splits: Callable[[int], Splits] = lambda seq: ({}, {})
    """Returns the splits of the all-to-all with this number."""

    @cached_property
    def latest(self) -> dict[int, tuple[str, str]]:
        """Sequence number → (signature, line of code), for the latest collectives.

        Read from the board on first use, because most readers need only the counters.
        """
        return self.read_latest()


@dataclass(frozen=True)
class MessageChannel:
    """Messages that match one another: one direction, peer, tag and process group."""

    sends: bool
    """True on the rank that sends, False on the rank that receives."""
    peer: int
    tag: int
    group: int

    # As one word: direction, 6 bits of peer, 24 of tag, 33 of group key.
    MAX_TAG = (1 << 24) - 1

    def word(self) -> int:
        """Return the channel as one non-zero 64-bit word."""
        return self.sends << 63 | self.peer << 57 | self.tag << 33 | self.group

    @classmethod
    def of(cls, word: int) -> MessageChannel:
        """Return the channel that a word stands for."""
        return cls(
            bool(word >> 63), word >> 57 & 63, word >> 33 & cls.MAX_TAG, word & ((1 << 33) - 1)
        )

    @classmethod
    def any_source(cls, rank: int, tag: int, group: int) -> MessageChannel:
        """Return the channel of a receive from any source by `rank`.

        Its peer is `rank` itself. No real channel has that peer, as no rank sends to itself.
        """
        return cls(False, rank, tag, group)

    def other_end(self, rank: int) -> MessageChannel:
        """Return this channel of `rank` as its peer sees it."""
        return MessageChannel(not self.sends, rank, self.tag, self.group)


@dataclass(frozen=True)
class Message:
    """The properties that a send and its receive must share."""

    numel: int
    dtype: str
    """For example ``float32``."""

    def word(self) -> int:
        """Return the message as one 64-bit word."""
        code = _DTYPES.index(self.dtype) if self.dtype in _DTYPES else len(_DTYPES)
        return self.numel << 8 | code

    @classmethod
    def of(cls, word: int) -> Message:
        """Return the message that a word stands for; an unknown dtype becomes ''."""
        code = word & 255
        return cls(word >> 8, _DTYPES[code] if code < len(_DTYPES) else "")


_DTYPES = (
    *("float32", "float64", "float16", "bfloat16"),
    *("uint8", "int8", "int16", "int32", "int64", "bool"),
    *("complex64", "complex128", "uint16", "uint32", "uint64"),
)


@dataclass(frozen=True)
class RankView:
    """One rank's part of the board at one moment."""

    rank: int
    state: RankPhase
    changes: int
    """How often this part has changed. If it is equal in two views, nothing happened in between."""
    wait: Wait
    group: int
    """Key of the process group in which the rank waits."""
    seq: int
    """The number, from 1, of the collective or of the channel's message that the rank waits for;
    0 while the group itself is being made."""
    channel: MessageChannel | None
    since: float
    """When the state began, in seconds of the machine's monotonic clock."""
    pending: int
    """Operations that were launched and are not over."""
    text: str
    where: str
    channels: Mapping[MessageChannel, int]
    """Messages started so far, by channel."""
    groups: Mapping[int, GroupView]
    saw_mismatch: bool = False
    read_messages: Callable[[MessageChannel], dict[int, Message]] = lambda channel: {}
    """Returns the latest messages of a channel, by number."""

    @property
    def from_anyone(self) -> bool:
        """Whether the rank waits for a message from any rank."""
        return self.channel is not None and self.channel.peer == self.rank

    @property
    def in_short(self) -> str:
        """The rank's current activity, in a few words."""
        if self.state in (RankPhase.BLOCKED, RankPhase.LIMITED):
            return self.text.partition(" (")[0]
        return self.state.name.lower()

    def count(self, channel: MessageChannel) -> int:
        """Return how many messages this rank has started on `channel`."""
        return self.channels.get(channel, 0)
