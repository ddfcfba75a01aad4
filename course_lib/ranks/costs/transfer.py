"""One collective under way: which of its messages are sent, and which members are done.

Messages of several collectives, and of sends, share links. A message of a collective occupies its
ports when both are free. If several messages wait for a port, the one that was ready first gets it.
Until then, a message occupies no port. So while one message of a collective waits for a busy
receiver, a different one may leave.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from course_lib.ranks.costs.links import Links

Message = tuple[int, int, int]
"""Sender, receiver (both as ranks of the group), bytes."""
Round = list[Message]


class Transfer:
    """The messages of one collective, in rounds: a member enters a round when it has left the last.

    A message starts when both its ends have entered its round. So a late member delays only the
    members that depend on it.

    Args:
        links: the links that carry the messages.
        members: the members of the group, as ranks of the group of all ranks.
        rounds: the rounds, which may be made one by one.

    Attributes:
        times: per member, the time until which it is busy, as far as this is known.

    """

    def __init__(self, links: Links, members: Sequence[int], rounds: Iterable[Round]) -> None:
        self.times = [0.0] * len(members)
        self._links = links
        self._members = members
        self._rounds = iter(rounds)
        self._made: list[dict[int, list[int]]] = []
        """Per round: member → the numbers of its messages that have not been sent."""
        self._messages: list[tuple[Message, int]] = []
        """(message, its round) for each number."""
        self._half: dict[int, float] = {}
        """Number of a message that only one of its ends has reached → the time."""
        self._waiting: list[int] = []
        """Members that have entered but have not begun their first round."""
        self._ready: list[tuple[float, float, int]] = []
        """Heap of (earliest start, time from which it is ready, number) of messages."""
        self._ended: list[int] = []

    def enter(self, member: int, time: float) -> None:
        """Let `member` begin at `time`, in seconds."""
        self.times[member] = time
        self._waiting.append(member)

    def next_start(self) -> float | None:
        """Return the time of the next start; ``None`` if another member must enter first."""
        entry_times = [self.times[member] for member in self._waiting]
        return min([*entry_times, *(start for start, _, _ in self._ready[:1])], default=None)

    def advance(self, until: float = math.inf) -> list[int]:
        """Send what is ready before `until`; return the members that are done.

        A member that is done may send something else. So nothing is sent that starts after that.
        """
        while self._waiting:
            self._go_on(self._waiting.pop(0), 0)
        ready, members, links = self._ready, self._members, self._links
        ended, self._ended = self._ended, []
        until = min([until, *(self.times[member] for member in ended)])
        while ready and ready[0][0] < until:
            # Messages that can start together start in the order of their rounds. In the order in
            # which members come, messages of a direct exchange would collide.
            start, ready_time, number = heapq.heappop(ready)
            source, target, nbytes = self._messages[number][0]
            free = links.free_from(members[source], members[target], start)
            if free > start:
                heapq.heappush(ready, (free, ready_time, number))
                continue
            left, arrival = links.send(members[source], members[target], nbytes, start)
            self._sent(number, left, arrival)
            while self._ended:
                ended.append(self._ended.pop(0))
                until = min(until, self.times[ended[-1]])
        return ended

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
            ready = max(before, time)
            heapq.heappush(self._ready, (ready, ready, number))

    def _round(self, at: int) -> dict[int, list[int]] | None:
        while len(self._made) <= at:
            messages = next(self._rounds, None)
            if messages is None:
                return None
            numbers_by_member: defaultdict[int, list[int]] = defaultdict(list)
            for number, (source, target, _) in enumerate(messages, len(self._messages)):
                numbers_by_member[source].append(number)
                numbers_by_member[target].append(number)
            self._messages += [(message, len(self._made)) for message in messages]
            self._made.append(numbers_by_member)
        return self._made[at]

    def _sent(self, number: int, left: float, arrival: float) -> None:
        """Note when a message has left and arrived, and offer the messages that waited for it."""
        (source, target, _), at = self._messages[number]
        self.times[source] = max(self.times[source], left)
        self.times[target] = max(self.times[target], arrival)
        for end in (source, target):
            left_over = self._made[at][end]
            left_over.remove(number)
            if not left_over:
                self._go_on(end, at + 1)
