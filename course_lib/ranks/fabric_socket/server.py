"""A fabric at the end of a Unix socket, for ranks that are processes and need not be trusted.

Every connection is one rank. The server reads frames, checks them, and answers a rank that waits
when what it waits for has happened. A rank that breaks the protocol, or hangs up, has ended: those
that wait for it are told so, all others go on. A rank that neither computes nor says anything
cannot be told from one that computes for long: it holds its own run up until the time limit.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from course_lib.ranks.costs.network import Network
from course_lib.ranks.explain.errors import RankError, RanksError, RankState, RankTimeout
from course_lib.ranks.fabric.diagnosis import explain_failure, explain_leftovers, rank_states
from course_lib.ranks.fabric.fabric import Fabric, Phase
from course_lib.ranks.fabric_socket import frames
from course_lib.ranks.fabric_socket.connection import CHUNK, Connection
from course_lib.ranks.fabric_socket.frames import FrameError, Type
from course_lib.ranks.fabric_socket.post import read_post

_MAX_GROUPS = 1024
_MAX_OPEN = 10_000


class FabricServer:
    """Serves one run of `world_size` ranks.

    Args:
        path: of the socket; it must not exist yet. Only this user can connect.
        world_size: K.
        network: what messages cost.
        max_frame: bytes of the largest frame that a rank may send.
        max_held: bytes that one rank may have in operations that are not over.
        trust_clocks: whether the ranks' own word counts for what they compute.

    Attributes:
        secrets: per rank, 16 bytes that it must show.
        fabric: its clocks and events.

    """

    def __init__(
        self,
        path: str,
        world_size: int,
        network: Network,
        *,
        max_frame: int = frames.MAX_BODY,
        max_held: int = 1 << 30,
        trust_clocks: bool = True,
    ) -> None:
        self.world_size = world_size
        self.fabric = Fabric(world_size, network)
        self.secrets = [secrets.token_bytes(16) for _ in range(world_size)]
        self.failures: dict[int, str] = {}
        self._max_frame = max_frame
        self._max_held = max_held
        self._trust = trust_clocks
        self._ranks: dict[int, Connection] = {}
        self._over = 0
        self._path = path
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._listener.bind(path)
        os.chmod(path, 0o600)
        self._listener.listen(world_size + 8)
        self._selector.register(self._listener, selectors.EVENT_READ, None)

    def serve(self, timeout: float, alive: Callable[[], bool] = lambda: True) -> None:
        """Serve until every rank has ended.

        Args:
            timeout: seconds for the whole run.
            alive: asked now and then; when it says no, ranks that never came have ended.

        Raises:
            RankError: a rank raised, hung up or broke the protocol.
            DeadlockError: the ranks wait for one another, or left communication behind.
            MismatchError: the ranks entered different collectives.
            RankTimeout: the run outlasted `timeout`.

        """
        deadline = time.monotonic() + timeout
        try:
            while self._over < self.world_size:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise RankTimeout(
                        f"The run took longer than its limit of {timeout:g} s.",
                        self._states(),
                        "A rank that is 'running' computes, sleeps or loops.",
                    )
                for key, mask in self._selector.select(min(left, 0.1)):
                    if key.data is None:
                        self._accept()
                        continue
                    if mask & selectors.EVENT_WRITE:
                        self._write(key.data)
                    if mask & selectors.EVENT_READ and key.data.channel.fileno() >= 0:
                        self._read(key.data)
                if not alive():
                    for rank in set(range(self.world_size)) - self._ranks.keys():
                        self._end(rank, "its process ended before it had connected")
                self._settle()
            self._raise_outcome()
        finally:
            self.close()

    def close(self) -> None:
        """Hang up on everyone and remove the socket."""
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        with suppress(FileNotFoundError):
            os.unlink(self._path)

    # Bytes ------------------------------------------------------------------------------------

    def _accept(self) -> None:
        with suppress(OSError):
            channel, _ = self._listener.accept()
            channel.setblocking(False)
            if len(self._selector.get_map()) > 4 * self.world_size + 16:
                channel.close()  # far more connections than ranks: not ours
                return
            self._selector.register(channel, selectors.EVENT_READ, Connection(channel))

    def _read(self, connection: Connection) -> None:
        budget = CHUNK
        try:
            while budget > 0:
                size, kind = connection.receive(self._max_frame)
                if size == 0:
                    return self._hang_up(connection, "it hung up")
                if kind is not None:
                    self._handle(connection, kind, connection.body)
                    size = max(size, 1024)  # a frame costs more than its bytes
                budget -= size
        except BlockingIOError:
            return
        except FrameError as error:
            self._hang_up(connection, f"it broke the protocol: {error}")
        except OSError as error:
            self._hang_up(connection, f"its connection failed: {error}")

    def _write(self, connection: Connection) -> None:
        try:
            sent = connection.channel.send(connection.outgoing)
            del connection.outgoing[:sent]
        except BlockingIOError:
            return
        except OSError as error:
            return self._hang_up(connection, f"its connection failed: {error}")
        if not connection.outgoing:
            self._selector.modify(connection.channel, selectors.EVENT_READ, connection)

    def _send(self, connection: Connection, data: bytes) -> None:
        connection.outgoing += data
        self._selector.modify(
            connection.channel, selectors.EVENT_READ | selectors.EVENT_WRITE, connection
        )
        self._write(connection)

    # Frames -----------------------------------------------------------------------------------

    def _handle(self, connection: Connection, kind: Type, body: bytearray) -> None:
        rank = connection.rank
        if rank is None:
            if kind is not Type.HELLO:
                raise FrameError("the first frame must say who you are")
            return self._greet(connection, *frames.read_hello(body))
        if connection.waits_for is not None or self.fabric.phase[rank] is not Phase.RUNNING:
            raise FrameError("a frame from a rank that waits or has ended")
        if kind is Type.GROUP:
            number, name, members = frames.read_group(body, self.world_size)
            unfit = number in connection.groups or rank not in members
            if unfit or len(connection.groups) >= _MAX_GROUPS:
                raise FrameError("a group that cannot be")
            connection.groups[number] = name, members
        elif kind is Type.POST:
            posted = read_post(body, rank, connection.groups, self._max_frame)
            operation = posted.operation
            size = sum(t.numel() * t.element_size() for t in operation.outputs if not t.is_meta)
            connection.held += size + len(body)
            if len(connection.open) >= _MAX_OPEN or connection.held > self._max_held:
                raise FrameError("too much that is not over")
            if posted.number in connection.open:
                raise FrameError("a number that is in use")
            connection.open[posted.number] = operation
            self._advance(rank, posted.advance)
            self.fabric.post(operation)
        elif kind in (Type.WAIT, Type.TEST):
            number, seconds = frames.read_wait(body)
            if number not in connection.open:
                raise FrameError("an operation that was never posted, or is over")
            self._advance(rank, seconds)
            connection.waits_for = kind, number
            if kind is Type.WAIT and not self.fabric.wait(connection.open[number]):
                self._answer(connection)
        elif kind is Type.FINISH:
            raised, seconds = frames.read_finish(body)
            self._advance(rank, seconds)
            self._end(rank, "it raised an exception" if raised else "")
        else:
            raise FrameError(f"{kind.name} is for the fabric to say")

    def _greet(self, connection: Connection, rank: int, secret: bytes) -> None:
        if (
            rank >= self.world_size
            or not secrets.compare_digest(secret, self.secrets[rank])
            or rank in self._ranks
            or self.fabric.phase[rank] is not Phase.RUNNING
        ):
            raise FrameError("a rank that is not expected")
        connection.rank = rank
        self._ranks[rank] = connection

    def _advance(self, rank: int, seconds: float) -> None:
        if self._trust:
            self.fabric.advance(rank, seconds)

    def _answer(self, connection: Connection) -> None:
        """Tell a rank that what it waits for is over; for TEST, whether it is."""
        assert connection.rank is not None and connection.waits_for is not None
        kind, number = connection.waits_for
        operation = connection.open[number]
        connection.waits_for = None
        over = kind is Type.WAIT or self.fabric.is_done(operation)
        clock = self.fabric.clock[connection.rank]
        if not over:
            return self._send(connection, frames.done(Type.LATER, number, clock))
        del connection.open[number]
        held = sum(
            t.numel() * t.element_size()
            for t in {id(t): t for t in (*operation.inputs, *operation.outputs)}.values()
            if not t.is_meta
        )
        connection.held = max(0, connection.held - held)
        self._send(connection, frames.done(Type.DONE, number, clock, operation))

    # What happens -----------------------------------------------------------------------------

    def _running(self) -> list[tuple[float, int]]:
        fabric = self.fabric
        return [
            (fabric.clock[rank], rank)
            for rank, phase in enumerate(fabric.phase)
            if phase is Phase.RUNNING
        ]

    def _settle(self) -> None:
        """Let happen what can, and answer those who can go on."""
        while True:
            running = self._running()
            horizon = min(running)[0] if running else float("inf")
            rank = self.fabric.next_rank(horizon)
            if rank is None:
                # A rank that asks sees all that happens before its clock: it must be the earliest.
                if running and (asking := self._asking(min(running)[1])) is not None:
                    self._answer(asking)
                    continue
                break
            self._answer(self._ranks[rank])
        stuck = not running and any(phase is Phase.BLOCKED for phase in self.fabric.phase)
        if self.fabric.failure is not None or stuck:
            error = explain_failure(self.fabric)
            self._stop_all(str(error))
            self._raise_failures(error.states)
            raise error

    def _asking(self, rank: int) -> Connection | None:
        connection = self._ranks.get(rank)
        if connection is None or connection.waits_for is None:
            return None
        return connection

    def _end(self, rank: int, reason: str) -> None:
        if self.fabric.phase[rank] in (Phase.FINISHED, Phase.RAISED):
            return
        self.fabric.finish(rank, raised=bool(reason))
        self._over += 1
        if reason:
            self.failures[rank] = reason

    def _hang_up(self, connection: Connection, reason: str) -> None:
        if connection.channel.fileno() < 0:
            return
        self._selector.unregister(connection.channel)
        connection.channel.close()
        if connection.rank is not None:
            self._end(connection.rank, reason)

    def _stop_all(self, reason: str) -> None:
        for connection in self._ranks.values():
            if connection.channel.fileno() >= 0:
                self._send(connection, frames.frame(Type.STOP, reason.encode()[:4096]))

    def _states(self) -> list[RankState]:
        states: list[Any] = rank_states(self.fabric)
        for rank in range(self.world_size):
            if rank not in self._ranks and rank not in self.failures:
                states[rank] = RankState(rank, "never connected")
        return states

    def _raise_failures(self, states: Any) -> None:
        if not self.failures:
            return
        first = next(iter(self.failures))
        rows = [
            RankState(row.rank, self.failures.get(row.rank, row.doing), row.where) for row in states
        ]
        raise RankError(f"Rank {first} ended: {self.failures[first]}.", rows, rank=first)

    def _raise_outcome(self) -> None:
        self._raise_failures(rank_states(self.fabric))
        leftovers: RanksError | None = explain_leftovers(self.fabric)
        if leftovers is not None:
            raise leftovers
