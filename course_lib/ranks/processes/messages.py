"""The messages between the parent and a rank, object by object; `object_pipe` carries them.

To the rank, for each call: a `CallHead`; the surroundings, or None if they have not changed; what
all ranks share of the call; and what this rank alone gets of it, a list.

From the rank: an `AnswerHead` and, with `DISPLAY`, a bundle, any number of times. With every other
kind, two more objects: the log, as tuples of what an `Event` has, and the result or the `Failure`.
`READY` comes once, before the first call; each call has one of the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from course_lib.ranks.processes.object_pipe import Read
from course_lib.ranks.trace.event import Event

READY, DISPLAY, RESULT, FAILURE, GIVEN_UP = range(5)
"""Kinds of answers."""


class CallHead(NamedTuple):
    """Tells a rank, before a call, what is not the notebook's."""

    call: int
    generation: int
    """How many calls were given up before it."""
    check_nan: bool


class AnswerHead(NamedTuple):
    """Tells the parent how a call ended; its log and its result follow."""

    kind: int
    dropped: int = 0
    """Events that found no room in the log."""
    joined: bool = True
    """Whether the rank still has its process groups."""


@dataclass(frozen=True)
class Answer:
    """The answer of a rank, as it has arrived: unpickled as far as it is needed."""

    head: AnswerHead
    log: Read
    value: Read
    """Of the result, or of the `Failure`."""

    def events(self) -> list[Event]:
        """Return the log; it is unpickled only here, for nobody looks at most of them."""
        return [Event(*event) for event in self.log()]
