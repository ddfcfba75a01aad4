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

from course_lib.ranks.trace.event import Event

READY, DISPLAY, RESULT, FAILURE, GIVEN_UP = range(5)
"""First byte of what a rank sends."""

_CALL = struct.Struct("<QQ???")
_ANSWER = struct.Struct("<BQ?")


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
    log: Any
    """The events, as bytes: see `events`."""

    @classmethod
    def of(cls, kind: int, dropped: int, joined: bool, events: Iterable[Event]) -> AnswerHead:
        """Return the head, with the log of the call."""
        return cls(kind, dropped, joined, pickle.dumps([tuple(event) for event in events], 5))

    def to_bytes(self) -> bytes:
        """Return what `read` reads."""
        return _ANSWER.pack(self.kind, self.dropped, self.joined) + bytes(self.log)

    @classmethod
    def read(cls, data: Any) -> AnswerHead:
        """Return the head that `data` begins with."""
        kind, dropped, joined = _ANSWER.unpack_from(data)
        return cls(kind, dropped, joined, memoryview(data)[_ANSWER.size :])

    def events(self) -> list[Event]:
        """Return the log; it is unpickled only here, for nobody looks at most of them."""
        return [Event(*event) for event in pickle.loads(self.log)]
