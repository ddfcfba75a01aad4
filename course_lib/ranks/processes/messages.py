"""What goes through the pipe between the parent and a rank, in this order.

To the rank, for each call: `CallHead`; the surroundings, if they have changed; what all ranks share
of the call; what this rank alone gets of it, if anything.

From the rank: `READY`, once; `DISPLAY` and a bundle, any number of times; and for each call
`AnswerHead`, with the log, and the result or failure.

The heads are not pickled: of an empty call, pickling them would be a third of the time.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

from course_lib.ranks.trace.event import Event, computation

READY, DISPLAY, RESULT, FAILURE, GIVEN_UP = range(5)
"""First byte of what a rank sends."""

_CALL = struct.Struct("<QQ???")
_ANSWER = struct.Struct("<BQ?Qdd")


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
        return cls._make(_CALL.unpack(data))


class AnswerHead(NamedTuple):
    """What came of a call, without its result."""

    kind: int
    dropped: int
    """Events that found no room in the log."""
    joined: bool
    """Whether the rank still has its process groups."""
    rank: int
    start: float
    end: float
    """Of the call, in seconds of the machine's monotonic clock."""
    log: Any = b""
    """The events, packed; nothing, if the rank did not communicate: it computed all the time."""

    def to_bytes(self) -> bytes:
        """Return what `read` reads."""
        return _ANSWER.pack(*self[:-1]) + bytes(self.log)

    @classmethod
    def read(cls, data: Any) -> AnswerHead:
        """Return the head that `data` begins with."""
        return cls._make([*_ANSWER.unpack_from(data), memoryview(data)[_ANSWER.size :]])

    def events(self) -> list[Event]:
        """Return the log; it is unpacked only here, for nobody looks at most of them."""
        if len(self.log):
            return [Event(*event) for event in pickle.loads(self.log)]
        return [computation(self.rank, self.start, self.end)] if self.end > self.start else []


def pack_log(events: Iterable[Event]) -> bytes:
    """Return what `AnswerHead.log` is of a call with these events."""
    return pickle.dumps([tuple(event) for event in events], 5)
