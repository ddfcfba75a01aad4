"""A second simulation of messages and collectives, an oracle for the fabric's: no code is shared.

A program is, per rank, a list of actions:

    ("compute", seconds)
    ("send", peer, bytes)       started, and not waited for
    ("recv", peer, bytes)       likewise
    ("collective", kind, root, bytes)    likewise; `bytes` of each tensor that a rank gives or gets
    ("wait",)                   for all that the rank has started, in order

The rules are those that `Network` states: a message of n bytes takes α + n/β; a port carries one
message at a time, first come, first served; a collective is its algorithm's rounds of messages, of
which each starts when both its ends are in its round and both their ports are free; until then it
holds no port. It begins to ask for ports when its last rank has entered. Several
at once: first the ranks' first actions, then their second ones, and so on; of these, by rank.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Action = tuple[Any, ...]
Program = Sequence[Sequence[Action]]
"""Per rank, its actions."""


@dataclass(eq=False)
class _Started:
    """Something that a rank has started."""

    rank: int
    action: Action
    posted: float
    end: float | None = None


@dataclass(eq=False)
class _Collective:
    """One collective, to which ranks come one by one."""

    rounds: list[list[tuple[int, int, int]]]
    entered: dict[int, _Started] = field(default_factory=dict)
    parts: dict[int, _Started] = field(default_factory=dict)
    at: dict[int, int] = field(default_factory=dict)
    """Rank → the round in which it is."""
    time: dict[int, float] = field(default_factory=dict)
    """Rank → until when it is busy."""
    came: dict[int, float] = field(default_factory=dict)
    """Rank → when it came into its round."""
    sent: set[tuple[int, int]] = field(default_factory=set)
    """(round, place in it) of messages that are on their way."""
    over: set[tuple[int, int]] = field(default_factory=set)


class EventSimulation:
    """Runs one program; `ends` has, per rank, the end of everything that it started, in order.

    Args:
        program: what the ranks do.
        latency: α, in seconds.
        bandwidth: β, in bytes per second.
        eager_below: messages of fewer bytes leave without waiting for their receive.

    """

    def __init__(
        self, program: Program, latency: float, bandwidth: float, eager_below: int = 0
    ) -> None:
        self.k = len(program)
        self.ends: list[list[float | None]] = []
        self._program = program
        self._latency, self._bandwidth, self._eager = latency, bandwidth, eager_below
        self._clock = [0.0] * self.k
        self._next = [0] * self.k
        self._started: list[list[_Started]] = [[] for _ in range(self.k)]
        self._blocked: list[_Started | None] = [None] * self.k
        self._turn = [(0.0, -1)] * self.k
        self._events: list[tuple[float, int, Any, int, Callable[[], None]]] = []
        self._count = 0
        self._out: defaultdict[int, float] = defaultdict(float)
        self._in: defaultdict[int, float] = defaultdict(float)
        self._sends: defaultdict[tuple[int, int], deque[tuple[_Started, float | None]]] = (
            defaultdict(deque)
        )
        self._receives: defaultdict[tuple[int, int], deque[_Started]] = defaultdict(deque)
        self._collectives: list[_Collective] = []
        self._entered = [0] * self.k
        self._streams: list[deque[tuple[_Collective, _Started]]] = [deque() for _ in range(self.k)]
        self._over = [0.0] * self.k
        """Until when a rank is in the collectives whose end it knows."""
        self._run()
        self.ends = [[started.end for started in own_started] for own_started in self._started]

    # Ranks and time -----------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            ready = [r for r in range(self.k) if self._can_run(r)]
            first = min(ready, key=lambda r: (self._clock[r], r), default=None)
            if first is not None and (not self._events or self._clock[first] <= self._events[0][0]):
                self._step(first)
            elif self._events:
                heapq.heappop(self._events)[-1]()
            else:
                return

    def _can_run(self, rank: int) -> bool:
        return self._blocked[rank] is None and self._next[rank] < len(self._program[rank])

    def _step(self, rank: int) -> None:
        action = self._program[rank][self._next[rank]]
        if action[0] == "compute":
            self._clock[rank] += action[1]
        elif action[0] == "wait":
            for started in self._started[rank]:
                if started.end is None:
                    self._blocked[rank] = started
                    return
                self._clock[rank] = max(self._clock[rank], started.end)
        else:
            self._start(rank, action)
        self._next[rank] += 1

    def _start(self, rank: int, action: Action) -> None:
        now = self._clock[rank]
        started = _Started(rank, action, now)
        self._started[rank].append(started)
        at, turn = self._turn[rank]
        turn = turn + 1 if at == now else 0
        self._turn[rank] = now, turn
        happen = {"send": self._send, "recv": self._receive, "collective": self._enter}[action[0]]
        self._at(now, turn, rank, lambda: happen(started))

    def _at(self, time: float, turn: int, rank: int, happen: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (time, turn, rank, self._count, happen))

    def _end(self, started: _Started, end: float) -> None:
        started.end = end
        if self._blocked[started.rank] is started:
            self._blocked[started.rank] = None
            self._clock[started.rank] = max(self._clock[started.rank], end)

    # Messages -----------------------------------------------------------------------------------

    def _carry(self, source: int, target: int, size: int, ready: float) -> tuple[float, float]:
        start = max(ready, self._out[source], self._in[target] - self._latency)
        left = self._out[source] = start + size / self._bandwidth
        arrival = self._in[target] = left + self._latency
        return left, arrival

    def _send(self, send: _Started) -> None:
        _, peer, size = send.action
        key, arrival = (send.rank, peer), None
        if size < self._eager:
            left, arrival = self._carry(send.rank, peer, size, send.posted)
            self._end(send, left)
        if self._receives[key]:
            self._meet(send, arrival, self._receives[key].popleft(), send.posted)
        else:
            self._sends[key].append((send, arrival))

    def _receive(self, receive: _Started) -> None:
        key = (receive.action[1], receive.rank)
        if self._sends[key]:
            send, arrival = self._sends[key].popleft()
            self._meet(send, arrival, receive, receive.posted)
        else:
            self._receives[key].append(receive)

    def _meet(self, send: _Started, arrival: float | None, receive: _Started, now: float) -> None:
        if arrival is None:
            left, arrival = self._carry(send.rank, receive.rank, send.action[2], now)
            self._end(send, left)
        self._end(receive, max(arrival, receive.posted))

    # Collectives --------------------------------------------------------------------------------

    def _enter(self, part: _Started) -> None:
        number = self._entered[part.rank]
        self._entered[part.rank] += 1
        if number == len(self._collectives):
            self._collectives.append(_Collective(rounds_of(self.k, *part.action[1:])))
        collective = self._collectives[number]
        collective.entered[part.rank] = part
        if len(collective.entered) < self.k:
            return
        for rank in range(self.k):
            stream = self._streams[rank]
            stream.append((collective, collective.entered[rank]))
            if len(stream) == 1:
                posted = collective.entered[rank].posted
                self._begin(collective, stream[0][1], max(posted, self._over[rank]))

    def _begin(self, collective: _Collective, part: _Started, now: float) -> None:
        collective.parts[part.rank] = part
        collective.time[part.rank] = now
        collective.at[part.rank] = -1
        self._go_on(collective, part.rank)

    def _go_on(self, collective: _Collective, rank: int) -> None:
        """Let a rank enter the next round that has messages of its own, or be done."""
        rounds = collective.rounds
        at = collective.at[rank] + 1
        while at < len(rounds) and not any(rank in message[:2] for message in rounds[at]):
            at += 1
        collective.at[rank] = at
        collective.came[rank] = collective.time[rank]
        if at < len(rounds):
            for place, (source, target, size) in enumerate(rounds[at]):
                entered = collective.at.get(source) == at == collective.at.get(target)
                if rank in (source, target) and entered:
                    now = max(collective.came[source], collective.came[target])
                    self._offer(collective, (at, place), (source, target, size), now)
            return
        part = collective.parts[rank]
        self._end(part, collective.time[rank])
        self._over[rank] = collective.time[rank]
        stream = self._streams[rank]
        stream.popleft()
        if stream:
            following, waiting = stream[0]
            self._begin(following, waiting, max(collective.time[rank], waiting.posted))

    def _offer(
        self, collective: _Collective, key: tuple[int, int], message: Any, now: float
    ) -> None:
        if key in collective.sent:
            return
        collective.sent.add(key)
        number = sum(len(messages) for messages in collective.rounds[: key[0]]) + key[1]

        def at(start: float) -> None:
            self._count += 1
            # Before all that ranks start at this moment; those that were ready first come first.
            heapq.heappush(
                self._events, (start, -1, (now, number), self._count, lambda: happen(start))
            )

        def happen(start: float) -> None:
            source, target, size = message
            free = max(self._out[source], self._in[target] - self._latency)
            if free > start:
                at(free)
                return
            left, arrival = self._carry(source, target, size, start)
            collective.over.add(key)
            for rank, time in ((source, left), (target, arrival)):
                collective.time[rank] = max(collective.time[rank], time)
            for rank in (source, target):
                own_keys = [
                    (key[0], place)
                    for place, other_message in enumerate(collective.rounds[key[0]])
                    if rank in other_message[:2]
                ]
                if all(own_key in collective.over for own_key in own_keys):
                    self._go_on(collective, rank)

        at(now)


def rounds_of(k: int, kind: str, root: int, size: int) -> list[list[tuple[int, int, int]]]:
    """Return the messages of a collective: rounds of (from, to, bytes)."""
    ranks = range(k)
    non_roots = [r for r in ranks if r != root]
    right = [(r, (r + 1) % k) for r in ranks]
    reach = 1
    while reach < k:
        reach *= 2
    if k == 1:
        return []
    if kind == "gather":
        return [[(r, root, size) for r in non_roots]]
    if kind == "scatter":
        return [[(root, r, size) for r in non_roots]]
    if kind == "all_gather":
        return [[(a, b, size) for a, b in right] for _ in range(k - 1)]
    if kind == "all_reduce":  # a ring; `size` divides by k
        return [[(a, b, size // k) for a, b in right] for _ in range(2 * (k - 1))]
    if kind == "all_to_all":
        return [[(r, (r + s) % k, size) for r in ranks] for s in range(1, k)]
    if kind == "barrier":
        steps = [1 << i for i in range(reach.bit_length() - 1)]
        return [[(r, (r + s) % k, 0) for r in ranks] for s in steps]
    if kind == "broadcast":  # those who have it pass it to those half as far away
        rounds, step = [], reach // 2
        while step:
            holders = range(0, k, 2 * step)
            rounds.append(
                [((h + root) % k, (h + step + root) % k, size) for h in holders if h + step < k]
            )
            step //= 2
        return rounds
    assert kind == "reduce", kind
    down = rounds_of(k, "broadcast", root, size)
    return [[(b, a, n) for a, b, n in messages] for messages in reversed(down)]
