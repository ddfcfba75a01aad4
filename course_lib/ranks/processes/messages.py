"""What the parent and a rank tell each other through their pipe.

To the rank, for each call: a `CallHead`; the surroundings, or None if they have not changed; what
all ranks share of the call; and what this rank alone gets of it, a list.

From the rank: an `AnswerHead` and, with `DISPLAY`, a bundle, any number of times. With every other
kind, two more objects: the log, as tuples of what an `Event` has, and the result or the `Failure`.
`READY` comes once, before the first call; each call has one of the others.
"""

from __future__ import annotations

from typing import NamedTuple

READY, DISPLAY, RESULT, FAILURE, GIVEN_UP = range(5)
"""Kinds of answers."""


class CallHead(NamedTuple):
    """What a rank must know before a call."""

    call: int
    generation: int
    """How many calls were given up before it."""
    check_nan: bool


class AnswerHead(NamedTuple):
    """What came of a call, without its log and its result."""

    kind: int
    dropped: int = 0
    """Events that found no room in the log."""
    joined: bool = True
    """Whether the rank still has its process groups."""
