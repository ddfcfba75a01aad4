"""One collective under way: which of its messages are sent, and which members are done.

Messages of several collectives, and of sends, share links. A message of a collective occupies its
ports when both are free. If several messages wait for a port, the one that was ready first gets it.
Until then, a message occupies no port. So while one message of a collective waits for a busy
receiver, a different one may leave.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

from course_lib.ranks.costs.links import Links

Message = tuple[int, int, int]
"""Sender, receiver (both as ranks of the group), bytes."""
Round = list[Message]


class Transfer(ABC):
    """The messages of one collective.

    Args:
        links: the links that carry the messages.
        members: the members of the group, as ranks of the group of all ranks.

    Attributes:
        times: per member, the time until which it is busy, as far as this is known.

    """

    def __init__(self, links: Links, members: Sequence[int]) -> None:
        self.times = [0.0] * len(members)
        self._links = links
        self._members = members
        self._ready: list[tuple[float, float, int, Message, int]] = []
        """Heap of (earliest start, time from which it is ready, order, message, number)."""
        self._ended: list[int] = []
        self._count = 0

    @abstractmethod
    def enter(self, member: int, time: float) -> None:
        """Let `member` begin at `time`, in seconds."""

    @abstractmethod
    def _sent(self, message: Message, number: int, left: float, arrival: float) -> None:
        """Note when a message has left and arrived, and offer the messages that waited for it."""

    def _offer(self, ready: float, message: Message, number: int) -> None:
        self._count += 1
        heapq.heappush(self._ready, (ready, ready, self._order(number), message, number))

    def _order(self, number: int) -> int:
        """Return the sort key of a message among messages that can start at the same time."""
        return self._count

    def next_start(self) -> float | None:
        """Return the time of the next start; ``None`` if another member must enter first."""
        return self._ready[0][0] if self._ready else None

    def advance(self, until: float = math.inf) -> list[int]:
        """Send what is ready before `until`, or until a member is done; return the done members."""
        ready, members, links = self._ready, self._members, self._links
        while not self._ended and ready and ready[0][0] < until:
            start, asked, order, message, number = heapq.heappop(ready)
            source, target, nbytes = message
            free = links.free_from(members[source], members[target], start)
            if free > start:
                heapq.heappush(ready, (free, asked, order, message, number))
                continue
            left, arrival = links.send(members[source], members[target], nbytes, start)
            self._sent(message, number, left, arrival)
        ended, self._ended = self._ended, []
        return ended


class RoundsTransfer(Transfer):
    """Messages in rounds: a member enters a round when it has left the previous one.

    A message starts when both its ends have entered its round. So a late member delays only the
    members that depend on it.

    Args:
        links: the links that carry the messages.
        members: the members of the group, as ranks of the group of all ranks.
        rounds: function that makes the rounds.

    """

    def __init__(
        self, links: Links, members: Sequence[int], rounds: Callable[[], Iterable[Round]]
    ) -> None:
        super().__init__(links, members)
        self._make = rounds
        self._rounds = iter(rounds())
        self._made: list[dict[int, list[int]]] = []
        """Per round: member → the numbers of its messages that have not been sent."""
        self._messages: list[tuple[Message, int]] = []
        """(message, its round) for each number."""
        self._half: dict[int, float] = {}
        """Number of a message that only one of its ends has reached → the time."""
        self._waiting: list[int] = []
        """Members that have entered but have not begun their first round."""
        self._begun = False

    def enter(self, member: int, time: float) -> None:
        self.times[member] = time
        self._waiting.append(member)

    def next_start(self) -> float | None:
        known = [self.times[member] for member in self._waiting]
        if (start := super().next_start()) is not None:
            known.append(start)
        return min(known, default=None)

    def advance(self, until: float = math.inf) -> list[int]:
        if until == math.inf and not self._begun and len(self._waiting) == len(self._members) > 2:
            members, self._waiting = self._waiting, []
            if self._at_once():
                return sorted(members)
            self._waiting = members
        self._begin()
        return super().advance(until)

    def _begin(self) -> None:
        while self._waiting:
            self._begun = True
            self._go_on(self._waiting.pop(0), 0)

    def _go_on(self, member: int, at: int) -> None:
        """Let a member enter its next round that has messages for it; the search starts at `at`."""
        while (messages_now := self._round(at)) is not None:
            if numbers := messages_now.get(member):
                for number in numbers:
                    self._come(number, self.times[member])
                return
            at += 1
        self._ended.append(member)

    def _come(self, number: int, time: float) -> None:
        before = self._half.pop(number, None)
        if before is None:
            self._half[number] = time
        else:
            self._offer(max(before, time), self._messages[number][0], number)

    def _order(self, number: int) -> int:
        # The order of the rounds. In the order in which members come, messages of a direct exchange
        # would collide.
        return number

    def _round(self, at: int) -> dict[int, list[int]] | None:
        while len(self._made) <= at:
            messages = next(self._rounds, None)
            if messages is None:
                return None
            here: dict[int, list[int]] = {}
            for message in messages:
                for end in message[:2]:
                    here.setdefault(end, []).append(len(self._messages))
                self._messages.append((message, len(self._made)))
            self._made.append(here)
        return self._made[at]

    def _sent(self, message: Message, number: int, left: float, arrival: float) -> None:
        source, target, _ = message
        self.times[source] = max(self.times[source], left)
        self.times[target] = max(self.times[target], arrival)
        at = self._messages[number][1]
        for end in (source, target):
            left_over = self._made[at][end]
            left_over.remove(number)
            if not left_over:
                self._go_on(end, at + 1)

    def _at_once(self) -> bool:
        """Send all messages round by round if this gives the same times; return whether it did.

        It is faster than sending them one by one. The times are the same if every link belongs to
        one member and carries one message a round, and if no member can be done, and send something
        else, before the last message starts.
        """
        if not self._links.private:
            return False
        before, times, latest = self._links.save(), self.times.copy(), 0.0
        members, send = self._members, self._links.send
        for messages in self._make():
            if len({m[0] for m in messages}) < len(messages) or (
                len({m[1] for m in messages}) < len(messages)
            ):
                break
            entered = times.copy()
            for source, target, nbytes in messages:
                # With half a million messages on 256 ranks, `max` would take a fifth of the time.
                start, other = entered[source], entered[target]
                if other > start:
                    start = other
                if start > latest:
                    latest = start
                left, arrival = send(members[source], members[target], nbytes, start)
                if left > times[source]:
                    times[source] = left
                if arrival > times[target]:
                    times[target] = arrival
        else:
            if latest < min(times):
                self.times = times
                self._begun = True
                return True
        self._links.restore(before)
        return False


class PipelinedTransfer(Transfer):
    """Pieces that are passed along a chain from the root; every receive is posted at the start.

    The time is (K-1)(α + s/β) + (S-1) s/β  for S pieces of s bytes.

    Args:
        links: the links that carry the messages.
        members: the members of the group, as ranks of the group of all ranks.
        root: the first rank of the chain, as a rank of the group.
        pieces: bytes of each piece.

    """

    def __init__(
        self, links: Links, members: Sequence[int], root: int, pieces: Sequence[int]
    ) -> None:
        super().__init__(links, members)
        self._root = root
        self._pieces = pieces
        self._last = (root - 1) % len(members)
        self._entered: dict[int, float] = {}
        self._here: dict[tuple[int, int], float] = {}
        """(member, piece) that has arrived and was not passed on yet → time of its arrival."""
        self._left = [
            len(pieces) * (1 + (m not in (root, self._last))) for m in range(len(members))
        ]
        """Per member, how many pieces it must still get or pass on."""

    def enter(self, member: int, time: float) -> None:
        self.times[member] = self._entered[member] = time
        if member == self._root:
            for piece in range(len(self._pieces)):
                self._have(member, piece, time)
        else:
            before = (member - 1) % len(self._members)
            for piece in range(len(self._pieces)):
                if (before, piece) in self._here:
                    self._have(before, piece, self._here.pop((before, piece)))

    def _have(self, member: int, piece: int, since: float) -> None:
        after = (member + 1) % len(self._members)
        if member == self._last:
            return
        if after in self._entered:
            ready = max(since, self._entered[after])
            self._offer(ready, (member, after, self._pieces[piece]), piece)
        else:
            self._here[member, piece] = since

    def _sent(self, message: Message, number: int, left: float, arrival: float) -> None:
        source, target, _ = message
        self.times[source] = max(self.times[source], left)
        self.times[target] = max(self.times[target], arrival)
        self._have(target, number, arrival)
        for end in (source, target):
            self._left[end] -= 1
            if not self._left[end]:
                self._ended.append(end)
