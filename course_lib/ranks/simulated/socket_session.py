"""The requests of ranks at the other ends of sockets, and what the fabric does with them.

`socket_server` reads and writes bytes. This module turns their frames into operations and answers.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from course_lib.ranks.costs.network import Network
from course_lib.ranks.explain.errors import RankError, RankState
from course_lib.ranks.simulated import socket_frames
from course_lib.ranks.simulated.fabric import Fabric, Phase
from course_lib.ranks.simulated.fabric_diagnosis import (
    explain_failure,
    explain_leftovers,
    fabric_states,
)
from course_lib.ranks.simulated.operation import Operation
from course_lib.ranks.simulated.socket_frames import Bounds, FrameError, Type, read_post

CHUNK = 1 << 18
"""How many bytes are read from one rank before the next rank gets its turn."""


class Connection:
    """One connection: its received bytes, its bytes to send, and its unfinished operations."""

    def __init__(self, channel: socket.socket, rank: int) -> None:
        self.channel = channel
        self.rank = rank
        self.groups: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.open: dict[int, Operation] = {}
        self.held = 0
        """Bytes of the open operations."""
        self.waits_for: tuple[Type, int] | None = None
        self.header = bytearray()
        self.type: Type | None = None
        self.body = bytearray()
        self.length = 0
        self.frames = 0
        self.operations = 0
        self.outgoing = bytearray()

    @property
    def holds(self) -> int:
        """Bytes that this process holds for the connection."""
        return self.held + len(self.body) + len(self.outgoing)

    def receive(self, limit: int) -> tuple[int, Type | None]:
        """Read once; return the number of bytes, 0 at the end, and the type of a complete frame.

        The body of a complete frame is then in `body`.

        Raises:
            FrameError: the bytes are not a frame.
            OverBoundError: the frame is longer than `limit`.
            BlockingIOError: no bytes have arrived.

        """
        if self.type is None:
            data = self.channel.recv(socket_frames.HEADER.size - len(self.header))
            self.header += data
            if len(self.header) < socket_frames.HEADER.size:
                return len(data), None
            self.type, self.length = socket_frames.read_header(bytes(self.header), limit)
            self.header, self.body = bytearray(), bytearray()
            self.frames += 1
        else:
            # Memory grows with the bytes that arrive, not with the announced length.
            data = self.channel.recv(min(CHUNK, self.length - len(self.body)))
            self.body += data
        if not data or len(self.body) < self.length:
            return len(data), None
        kind, self.type = self.type, None
        return len(data), kind


Answers = Callable[[int, bytes], tuple[bytes, float]]
"""A rank and its question → the answer, and the virtual seconds that it takes."""
_ENDED = (Phase.FINISHED, Phase.RAISED)


class Session:
    """One run of ranks on a fabric.

    Args:
        channels: one connection per rank, in rank order.
        network: what messages cost.
        send: sends a frame to a rank.
        bounds: how much the ranks may ask for.
        computes: which computations each rank may report; ``None``: any. See `FabricServer`.
        answers: answers the ranks' questions. See `FabricServer`.

    Attributes:
        fabric: the fabric, with its clocks and events.
        ranks: the ranks' connections.
        failures: rank → why it failed.
        bounds: how much each rank may ask for.

    """

    def __init__(
        self,
        channels: Sequence[socket.socket],
        network: Network,
        send: Callable[[Connection, bytes], None],
        *,
        bounds: Bounds,
        computes: Sequence[Mapping[float, int]] | None,
        answers: Answers | None,
    ) -> None:
        self.world_size = len(channels)
        self.fabric = Fabric(self.world_size, network)
        self.ranks = [Connection(channel, rank) for rank, channel in enumerate(channels)]
        self.failures: dict[int, str] = {}
        self.bounds = bounds.shared_by(self.world_size)
        self._send = send
        self._computes = None if computes is None else [Counter(each) for each in computes]
        self._answers = answers

    @property
    def over(self) -> bool:
        """Whether every rank has ended."""
        return all(phase in _ENDED for phase in self.fabric.phase)

    # Requests of a rank -------------------------------------------------------------------------

    def handle(self, connection: Connection, kind: Type, body: bytearray) -> None:
        """Do what a frame asks for.

        Raises:
            FrameError: the protocol does not allow the frame now.

        """
        rank = connection.rank
        if connection.waits_for is not None or self.fabric.phase[rank] is not Phase.RUNNING:
            raise FrameError("it sent a message while it waited, or after its end")
        if kind is Type.GROUP:
            self._introduce(connection, rank, body)
        elif kind is Type.POST:
            self._post(connection, rank, body)
        elif kind in (Type.WAIT, Type.TEST):
            self._ask(connection, rank, kind, body)
        elif kind is Type.COMPUTE:
            self._compute(rank, socket_frames.read_compute(body))
        elif kind is Type.ASK and self._answers is not None:
            self._reply(connection, rank, bytes(body))
        elif kind is Type.FINISH:
            self.end(rank, "it raised an exception" if socket_frames.read_finish(body) else "")
        else:
            raise FrameError(f"it sent {kind.name}, which only the simulated network may send")

    def expect_within_bounds(self, connection: Connection) -> None:
        """Raise `OverBoundError` if a rank holds too many bytes or has sent too many frames."""
        self.bounds.expect("held", connection.holds)
        self.bounds.expect("frames", connection.frames)

    def _introduce(self, connection: Connection, rank: int, body: bytearray) -> None:
        number, name, members = socket_frames.read_group(body, self.world_size)
        if number in connection.groups or rank not in members or len(name) > self.bounds.text:
            raise FrameError("it described a process group that cannot exist")
        self.bounds.expect("groups", 1 + len(connection.groups))
        connection.groups[number] = name, members

    def _post(self, connection: Connection, rank: int, body: bytearray) -> None:
        connection.operations += 1
        self.bounds.expect("operations", connection.operations)
        self.bounds.expect("open", 1 + len(connection.open))
        posted = read_post(body, rank, connection.groups, self.bounds.frame, self.bounds.text)
        operation = posted.operation
        size = sum(t.numel() * t.element_size() for t in operation.outputs)
        connection.held += size + len(body)
        if posted.number in connection.open:
            raise FrameError("it gave the number of an unfinished operation to a new one")
        connection.open[posted.number] = operation
        self.fabric.post(operation)

    def _ask(self, connection: Connection, rank: int, kind: Type, body: bytearray) -> None:
        number = socket_frames.read_wait(body)
        if number not in connection.open:
            raise FrameError("it waited for an operation that it never started, or that is over")
        connection.waits_for = kind, number
        if kind is Type.WAIT and not self.fabric.wait(connection.open[number]):
            self._answer(connection)

    def _compute(self, rank: int, seconds: float) -> None:
        if self._computes is not None:
            # A free choice of seconds could pass a message to everyone who sees this rank's clock.
            if not self._computes[rank][seconds]:
                return
            self._computes[rank][seconds] -= 1
        self.fabric.advance(rank, seconds)

    def _reply(self, connection: Connection, rank: int, question: bytes) -> None:
        connection.operations += 1
        self.bounds.expect("operations", connection.operations)
        assert self._answers is not None
        try:
            answer, seconds = self._answers(rank, question)
        except ValueError as error:
            raise FrameError(f"its question has no answer: {error}") from None
        self.fabric.advance(rank, seconds)
        self._send(connection, socket_frames.frame(Type.ANSWER, answer))

    def _answer(self, connection: Connection) -> None:
        """Answer a rank: to WAIT, that the operation is over; to TEST, whether it is."""
        assert connection.waits_for is not None
        kind, number = connection.waits_for
        operation = connection.open[number]
        connection.waits_for = None
        over = kind is Type.WAIT or self.fabric.is_done(operation)
        # The clock reveals when other ranks have sent: a rank that is not trusted does not get it.
        clock = self.fabric.clock[connection.rank] if self._computes is None else 0.0
        if not over:
            return self._send(connection, socket_frames.done(Type.LATER, number, clock))
        del connection.open[number]
        held = sum(
            t.numel() * t.element_size()
            for t in {id(t): t for t in (*operation.inputs, *operation.outputs)}.values()
        )
        connection.held = max(0, connection.held - held)
        self._send(connection, socket_frames.done(Type.DONE, number, clock, operation))

    # What happens -----------------------------------------------------------------------------

    def settle(self) -> None:
        """Carry out what is possible, and answer the ranks that can go on.

        Raises:
            RanksError: no rank can go on, or operations do not fit together. All ranks have been
                told.

        """
        while True:
            running = self._running()
            horizon = min(running)[0] if running else float("inf")
            rank = self.fabric.next_rank(horizon)
            if rank is None:
                # The answer to TEST must include everything before the rank's clock. So only the
                # rank with the earliest clock may be answered.
                if running and (asking := self._asking(min(running)[1])) is not None:
                    self._answer(asking)
                    continue
                break
            self._answer(self.ranks[rank])
        stuck = not running and any(phase is Phase.BLOCKED for phase in self.fabric.phase)
        if self.fabric.failure is not None or stuck:
            error = explain_failure(self.fabric)
            self._stop_all(str(error))
            self._raise_failures(error.states)
            raise error

    def _running(self) -> list[tuple[float, int]]:
        fabric = self.fabric
        return [
            (fabric.clock[rank], rank)
            for rank, phase in enumerate(fabric.phase)
            if phase is Phase.RUNNING
        ]

    def _asking(self, rank: int) -> Connection | None:
        connection = self.ranks[rank]
        return None if connection.waits_for is None else connection

    def end(self, rank: int, reason: str = "") -> None:
        """Mark a rank as ended; `reason` says why it failed, and is empty if it did not."""
        if self.fabric.phase[rank] not in _ENDED:
            self.fabric.finish(rank, raised=bool(reason))
            if reason:
                self.failures[rank] = reason

    def has_ended(self, rank: int) -> bool:
        """Return whether this rank has ended."""
        return self.fabric.phase[rank] in _ENDED

    def _stop_all(self, reason: str) -> None:
        for connection in self.ranks:
            if connection.channel.fileno() >= 0:
                self._send(connection, socket_frames.frame(Type.STOP, reason.encode()[:4096]))

    def states(self) -> list[RankState]:
        """Return what every rank does."""
        return fabric_states(self.fabric)

    def raise_outcome(self) -> None:
        """Raise the error of a run that is over, if something went wrong."""
        self._raise_failures(fabric_states(self.fabric))
        if (leftovers := explain_leftovers(self.fabric)) is not None:
            raise leftovers

    def _raise_failures(self, states: Sequence[RankState]) -> None:
        if not self.failures:
            return
        first = next(iter(self.failures))
        rows = [
            RankState(row.rank, self.failures.get(row.rank, row.doing), row.where) for row in states
        ]
        raise RankError(f"Rank {first} ended: {self.failures[first]}.", rows, rank=first)
