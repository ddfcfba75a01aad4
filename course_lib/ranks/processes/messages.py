"""What goes through the pipe between the parent and a rank, in this order.

To the rank, for each call: what all ranks share of it, as `packing` or `short_calls` has it, with
`CallHead` as its note; the surroundings, if they have changed; what this rank alone gets of the
call, if anything.

From the rank: `READY`, once; bundles with `DISPLAY` as their note, any number of times; and for
each call the result or failure, with `AnswerHead` as its note, and the log, if there is one.

The heads are not pickled, and most calls and answers are one message: that halves the time of an
empty call.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from course_lib.ranks.trace.event import Event, computation

READY, DISPLAY, RESULT, FAILURE, GIVEN_UP = range(5)
"""First byte of the note of what a rank sends."""

_CALL = struct.Struct("<QQ???")
_ANSWER = struct.Struct("<BQ??Qdd")


class CallHead(NamedTuple):
    """What a rank must know before a call."""

    call: int
    generation: int
    """How many calls were given up before it."""
    has_surroundings: bool
    has_own: bool
    check_nan: bool

    def to_bytes(self) -> bytes:
        """Return what `read` reads."""
        return _CALL.pack(*self)

    @classmethod
    def read(cls, data: Any) -> CallHead:
        """Return the head that `data` is."""
        return cls(*_CALL.unpack(data))


class AnswerHead(NamedTuple):
    """What came of a call, without its result."""

    kind: int
    dropped: int
    """Events that found no room in the log."""
    joined: bool
    """Whether the rank still has its process groups."""
    has_log: bool
    """Whether the log follows; else the rank did not communicate: it computed all the time."""
    rank: int
    start: float
    end: float
    """Of the call, in seconds of the machine's monotonic clock."""
    log: Callable[[], Any] | None = None
    """Reads what `pack_log` made, once it is there."""

    def to_bytes(self) -> bytes:
        """Return what `read` reads."""
        return _ANSWER.pack(*self[:-1])

    @classmethod
    def read(cls, data: Any) -> AnswerHead:
        """Return the head that `data` is."""
        return cls(*_ANSWER.unpack(data))

    def events(self) -> list[Event]:
        """Return the log; it is unpacked only here, for nobody looks at most of them."""
        if self.log is not None:
            return [Event(*event) for event in pickle.loads(self.log())]
        return [computation(self.rank, self.start, self.end)] if self.end > self.start else []


def pack_log(events: Iterable[Event]) -> bytes:
    """Return the log of a call with these events, as `AnswerHead.events` reads it."""
    return pickle.dumps([tuple(event) for event in events], 5)
