"""The fabric: matches sends and receives, carries them out, and counts the time they take.

It is a discrete-event simulation. A rank posts operations at its own clock and waits for them. The
fabric lets them happen in the order of their times, and only when no rank can still post an earlier
one. So the outcome depends on what the ranks do, and not on which of them this computer ran first.

The fabric knows no threads, no processes and no process groups: `simulated.baton` drives it with
threads, the grader with processes at the other end of a socket.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from dataclasses import dataclass
from enum import Enum

from course_lib.ranks._torch.this_thread import unseen
from course_lib.ranks.costs.links import Links
from course_lib.ranks.costs.network import Network
from course_lib.ranks.explain.errors import RanksError
from course_lib.ranks.simulated.collectives import Collectives, Running
from course_lib.ranks.simulated.operation import NEW_GROUP, Mismatch, Operation, event_of, stream_of
from course_lib.ranks.simulated.point_to_point import Messages
from course_lib.ranks.trace.event import Event, computation


class Phase(Enum):
    """What a rank does."""

    RUNNING = "running"
    READY = "ready to go on"
    BLOCKED = "blocked"
    FINISHED = "finished"
    RAISED = "raised"


@dataclass(frozen=True)
class _Limit:
    """The end of the time that a rank waits for an operation."""

    operation: Operation


_Happening = Operation | Running | _Limit


class Fabric:
    """A world of `world_size` ranks on `network`.

    Attributes:
        network: the network of the fabric.
        clock: per rank, virtual seconds.
        phase: per rank, what it does.
        waiting: per rank, the operation that it is blocked in.
        made: name of a group → the line on which it was made; includes groups of earlier runs.
        failure: what went wrong; ``None`` while nothing has. After a failure nothing more happens.

    """

    def __init__(
        self, world_size: int, network: Network, made: dict[str, str] | None = None
    ) -> None:
        self.world_size = world_size
        self.network = network
        self.clock = [0.0] * world_size
        self.phase = [Phase.RUNNING] * world_size
        self.waiting: list[Operation | None] = [None] * world_size
        self._events: list[Event] = []
        self.failure: RanksError | Mismatch | None = None
        self.entered: Counter[tuple[bool, str, int]] = Counter()
        """(whether it is a `NEW_GROUP`, group, rank) → how many of these the rank has posted."""
        self.made: dict[str, str] = {} if made is None else made
        self._links = Links(network, world_size)
        self._in_flight = Messages(self._links, self._end)
        self._collectives = Collectives(
            self._links,
            self._end,
            lambda time, running: self._push(time, 0, running.parts[0].rank, running),
        )
        self._sends: Counter[tuple[int, int | None]] = Counter()
        self._heap: list[tuple[float, int, int, int, _Happening]] = []
        self._posted = 0
        self._at_once = [(0.0, 0)] * world_size
        """Per rank, its clock at its last post, and how many earlier posts had the same clock."""
        self._ready: list[tuple[float, int]] = []
        self._polls: Counter[int] = Counter()
        self._span: dict[int, int] = {}
        """Rank → index of its last computation in `_events`, which a following one extends."""
        self._unwaited: dict[Operation, int] = {}
        """Operations that are over and that no rank waited for → their index in `_events`."""

    @property
    def events(self) -> list[Event]:
        """One event per finished operation or computation, in the order of their ends."""
        return sorted(self._events, key=lambda event: (event.end, event.rank))

    # Called by ranks -----------------------------------------------------------------------

    def post(self, operation: Operation) -> None:
        """Queue an operation at its rank's clock. The fabric carries it out later, in its turn."""
        rank = operation.rank
        operation.posted = self.clock[rank]
        if operation.kind == "send":
            self._sends[rank, operation.peer] += 1
            operation.seq = self._sends[rank, operation.peer]
        elif operation.kind != "recv":  # a receive gets the number of its send
            if operation.made:
                self.made.setdefault(operation.made, operation.where)
            key = stream_of(operation)
            self.entered[(*key, rank)] += 1
            operation.seq = self.entered[(*key, rank)]
        clock, before = self._at_once[rank]
        turn = before + 1 if clock == operation.posted else 0
        self._at_once[rank] = operation.posted, turn
        operation.turn = turn
        self._push(operation.posted, turn, rank, operation)

    def _push(self, time: float, turn: int, rank: int, happening: _Happening) -> None:
        """Queue what happens at `time`. If ranks post several at once, all first ones come first.

        If the order were rank by rank, rank 0's third message would be sent before rank 1's first
        one. An exchange in which no two first messages share a port would then take twice as long.
        """
        self._posted += 1
        heapq.heappush(self._heap, (time, turn, rank, self._posted, happening))

    def advance(self, rank: int, seconds: float, where: str = "") -> None:
        """Let `rank` compute for `seconds`."""
        start = self.clock[rank]
        end = self.clock[rank] = start + seconds
        if seconds <= 0:
            return
        at = self._span.get(rank)
        if at is not None and (self._events[at].end, self._events[at].where) == (start, where):
            self._events[at] = self._events[at]._replace(end=end)
        else:
            self._span[rank] = len(self._events)
            self._events.append(computation(rank, start, end, where))

    def wait(self, operation: Operation) -> bool:
        """Let the operation's rank wait for it; return whether the rank is blocked now."""
        rank = operation.rank
        self._polls[rank] = 0
        self._note_waited(operation)
        if operation.end is not None:
            self.clock[rank] = max(self.clock[rank], operation.end)
            return False
        self.phase[rank] = Phase.BLOCKED
        self.waiting[rank] = operation
        if operation.limit is not None:
            self._push(self.clock[rank] + operation.limit, 0, rank, _Limit(operation))
        return True

    def pause(self, rank: int) -> None:
        """Let `rank` go on only after everything that happens before its clock."""
        self.phase[rank] = Phase.READY
        heapq.heappush(self._ready, (self.clock[rank], rank))

    def is_done(self, operation: Operation) -> bool:
        """Return whether the operation is over at its rank's clock; asking takes virtual time.

        Time must pass in a loop that asks without end, or nothing that it waits for would happen.
        So the first question costs 1 µs, and each further one in a row twice as much, up to 1 ms.
        """
        rank = operation.rank
        self._note_waited(operation)
        if operation.end is not None and operation.end <= self.clock[rank]:
            self._polls[rank] = 0
            return True
        self.clock[rank] += min(1e-6 * 2 ** self._polls[rank], 1e-3)
        self._polls[rank] = min(self._polls[rank] + 1, 10)
        return False

    def _note_waited(self, operation: Operation) -> None:
        operation.waited = True
        if (at := self._unwaited.pop(operation, None)) is not None:
            self._events[at] = self._events[at]._replace(waited=True)

    def finish(self, rank: int, raised: bool = False) -> None:
        """Note that `rank` has ended."""
        self.phase[rank] = Phase.RAISED if raised else Phase.FINISHED
        self.waiting[rank] = None

    # What happens -----------------------------------------------------------------------------

    def next_rank(self, horizon: float = math.inf) -> int | None:
        """Let operations happen until a rank can go on; return it, or ``None`` if none can.

        Args:
            horizon: the earliest clock of the ranks that run right now.

        """
        # A rank's dispatch modes must see only the rank's operators, not those of the fabric.
        with unseen():
            return self._next_rank(horizon)

    def _next_rank(self, horizon: float) -> int | None:
        while self.failure is None:
            limit = min(horizon, self._ready[0][0]) if self._ready else horizon
            if self._heap and self._heap[0][0] < limit:
                time, *_, happening = heapq.heappop(self._heap)
                if isinstance(happening, _Limit):
                    self._give_up(happening.operation, time)
                elif isinstance(happening, Running):
                    until = min(limit, self._heap[0][0]) if self._heap else limit
                    self._collectives.go_on(happening, max(until, math.nextafter(time, math.inf)))
                else:
                    self._happen(happening)
            elif self._ready:
                rank = heapq.heappop(self._ready)[1]
                self.phase[rank] = Phase.RUNNING
                return rank
            else:
                return None
        return None

    def _happen(self, operation: Operation) -> None:
        try:
            if operation.kind == "send":
                self._in_flight.send(operation)
            elif operation.kind == "recv":
                self._in_flight.receive(operation)
            else:
                self._collectives.enter(operation)
        except Mismatch as mismatch:
            self.failure = mismatch
        except Exception as error:  # raised in whichever rank's turn it is, but it concerns all
            self.failure = RanksError(
                f"{operation.kind} of rank {operation.rank} failed ({operation.where}): {error}"
            )

    def _give_up(self, operation: Operation, time: float) -> None:
        """Let a rank go on if `operation`, whose own time limit is over, has not ended."""
        if operation.end is None:
            operation.missing = self.late(operation)
            self.release(operation, time)

    def late(self, operation: Operation) -> tuple[int, ...]:
        """Return the ranks that have yet to start what `operation` is part of."""
        if operation.kind == "recv" and operation.peer is None:
            return tuple(member for member in operation.members if member != operation.rank)
        if operation.kind in ("send", "recv"):
            assert operation.peer is not None
            return (operation.peer,)
        stream = stream_of(operation)
        return tuple(m for m in operation.members if self.entered[(*stream, m)] < operation.seq)

    def _end(self, operation: Operation, end: float) -> None:
        if operation.missing is not None:  # its rank has given up waiting for it
            return
        if operation.kind != NEW_GROUP:
            if not operation.waited:
                self._unwaited[operation] = len(self._events)
            self._events.append(event_of(operation, end))
        self.release(operation, end)

    def release(self, operation: Operation, end: float) -> None:
        """Mark an operation as over at `end`; if its rank waits for it, let the rank go on."""
        operation.end = end
        rank = operation.rank
        if self.waiting[rank] is operation:
            self.waiting[rank] = None
            self.clock[rank] = max(self.clock[rank], end)
            self.pause(rank)

    def forget(self) -> None:
        """Drop what is left when the run is over: tensors, and what refers to the fabric."""
        self._heap.clear()
        self._unwaited.clear()
        self.waiting = [None] * self.world_size
        del self._in_flight, self._collectives

    def unserved(self) -> list[Operation]:
        """Return the operations that were posted and have found no partner."""
        heap = sorted(self._heap, key=lambda item: item[:-1])
        waiting = [operation for *_, operation in heap if isinstance(operation, Operation)]
        left = [*waiting, *self._in_flight.unserved(), *self._collectives.unserved()]
        return [operation for operation in left if operation.missing is None]
