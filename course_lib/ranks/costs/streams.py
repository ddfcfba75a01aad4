"""Collectives under way: on each rank, those of a group run in order, as on a stream of NCCL."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from course_lib.ranks.costs.transfer import Transfer


class Part(Protocol):
    """The part of one rank in a collective."""

    @property
    def rank(self) -> int:
        """The rank."""

    @property
    def group(self) -> Hashable:
        """The process group."""

    @property
    def posted(self) -> float:
        """The time from which the rank is ready for the collective, in seconds."""


P = TypeVar("P", bound=Part)


@dataclass(eq=False)
class Running(Generic[P]):
    """A collective that all its ranks have entered."""

    parts: Sequence[P]
    """The parts of the ranks, in the order of the group."""
    transfer: Transfer
    offered: float = math.inf
    """The time of its latest `offer`: when it next wants to go on."""


class Streams(Generic[P]):
    """The collectives that are under way: on each rank, they run one after the other.

    Args:
        end: called with each rank's part and the time of its end, in seconds.
        offer: called with a time and a collective that can go on at this time.

    """

    def __init__(
        self, end: Callable[[P, float], None], offer: Callable[[float, Running[P]], None]
    ) -> None:
        self._end = end
        self._offer = offer
        self._streams: defaultdict[tuple[Hashable, int], deque[tuple[Running[P], int]]] = (
            defaultdict(deque)
        )
        self._over: defaultdict[tuple[Hashable, int], float] = defaultdict(float)
        """(group, rank) → the end of the latest collective there whose end is known, in seconds."""

    def add(self, parts: Sequence[P], transfer: Transfer) -> None:
        """Add a collective. On each rank, it begins when the group's previous one is over there."""
        running = Running(parts, transfer)
        for member, part in enumerate(parts):
            stream = self._streams[part.group, part.rank]
            stream.append((running, member))
            if len(stream) == 1:
                transfer.enter(member, max(part.posted, self._over[part.group, part.rank]))
        self._want(running)

    def go_on(self, running: Running[P], until: float) -> None:
        """Send the messages that a collective can send before `until`."""
        running.offered = math.inf
        for member in running.transfer.advance(until):
            part, end = running.parts[member], running.transfer.times[member]
            stream = self._streams[part.group, part.rank]
            stream.popleft()
            self._over[part.group, part.rank] = end
            if stream:
                following, next_member = stream[0]
                following.transfer.enter(next_member, max(end, following.parts[next_member].posted))
                self._want(following)
            self._end(part, end)
        self._want(running)

    def _want(self, running: Running[P]) -> None:
        start = running.transfer.next_start()
        if start is not None and start < running.offered:
            running.offered = start
            self._offer(start, running)
