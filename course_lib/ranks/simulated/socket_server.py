"""A fabric at the end of Unix sockets, for ranks that are processes and need not be trusted.

Every connection is one rank. The server reads frames and checks them. It answers a waiting rank
when the event that the rank waits for has happened. A rank that breaks the protocol or closes its
connection counts as ended: ranks that wait for it are told so, and all others go on. The server
cannot distinguish a rank that hangs from one that computes for a long time. Such a rank delays its
own run until the time limit.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Mapping, Sequence

from course_lib.ranks.costs.network import Network
from course_lib.ranks.explain.errors import RanksError, RankState
from course_lib.ranks.simulated.fabric import Fabric
from course_lib.ranks.simulated.socket_frames import LOOSE, Bounds, FrameError, OverBoundError
from course_lib.ranks.simulated.socket_session import CHUNK, Answers, Connection, Session


class FabricServer:
    """Serves one run of ranks. Select on `fileno`, and call `turn` whenever it is readable.

    Args:
        channels: one connection per rank, in rank order.
        network: what messages cost.
        bounds: how much the ranks may ask for.
        computes: for each rank, seconds → how often it may report a computation of that length.
            Other reports are not counted, and the rank does not learn its clock. ``None``: all
            reports count.
        answers: ``answers(rank, question)`` returns the bytes of the answer, and how many virtual
            seconds it takes; it raises ValueError if there is no answer. ``None``: ranks must not
            ask.

    Attributes:
        fabric: the fabric, with its clocks and events.
        hung_up: the ranks that closed their connection before they reported their end.

    """

    def __init__(
        self,
        channels: Sequence[socket.socket],
        network: Network,
        *,
        bounds: Bounds = LOOSE,
        computes: Sequence[Mapping[float, int]] | None = None,
        answers: Answers | None = None,
    ) -> None:
        self._session = Session(
            channels,
            network,
            self._send,
            bounds=bounds,
            computes=computes,
            answers=answers,
        )
        self.hung_up: set[int] = set()
        self._selector = selectors.DefaultSelector()
        for connection in self._session.ranks:
            connection.channel.setblocking(False)
            self._selector.register(connection.channel, selectors.EVENT_READ, connection)

    @property
    def fabric(self) -> Fabric:
        """The fabric: its clocks and events."""
        return self._session.fabric

    def fileno(self) -> int:
        """Return a descriptor that is readable when `turn` has something to do."""
        return self._selector.fileno()

    def turn(self, seconds: float = 0.0) -> None:
        """Read frames, carry out what is possible, and answer; wait at most `seconds` for frames.

        Raises:
            RanksError: no rank can go on, or operations do not fit together. All ranks have been
                told.

        """
        for key, mask in self._selector.select(seconds):
            if mask & selectors.EVENT_WRITE:
                self._write(key.data)
            if mask & selectors.EVENT_READ and key.data.channel.fileno() >= 0:
                self._read(key.data)
        self._session.settle()

    @property
    def over(self) -> bool:
        """Whether every rank has ended."""
        return self._session.over

    def states(self) -> list[RankState]:
        """Return what every rank does."""
        return self._session.states()

    @property
    def ended_badly(self) -> bool:
        """Whether a rank raised, closed its connection or broke the protocol."""
        return bool(self._session.failures)

    def outcome(self) -> RanksError | None:
        """Return the error of a run that is over: a failed rank, or communication left behind."""
        try:
            self._session.raise_outcome()
        except RanksError as error:
            return error
        return None

    def close(self) -> None:
        """Close all connections."""
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _read(self, connection: Connection) -> None:
        budget = CHUNK
        try:
            while budget > 0:
                size, kind = connection.receive(self._session.bounds.frame)
                if size == 0:
                    return self._disconnect(connection, "it closed its connection")
                self._session.expect_within_bounds(connection)
                if kind is not None:
                    self._session.handle(connection, kind, connection.body)
                    size = max(size, 1024)  # a frame costs more than its bytes
                budget -= size
        except BlockingIOError:
            return
        except OverBoundError as error:
            self._disconnect(connection, str(error), by_us=True)
        except FrameError as error:
            self._disconnect(connection, f"it broke the protocol: {error}", by_us=True)
        except OSError as error:
            self._disconnect(connection, f"its connection failed: {error}")

    def _write(self, connection: Connection) -> None:
        try:
            sent = connection.channel.send(connection.outgoing)
            del connection.outgoing[:sent]
        except BlockingIOError:
            return
        except OSError as error:
            return self._disconnect(connection, f"its connection failed: {error}")
        if not connection.outgoing:
            self._selector.modify(connection.channel, selectors.EVENT_READ, connection)

    def _send(self, connection: Connection, data: bytes) -> None:
        connection.outgoing += data
        self._selector.modify(
            connection.channel, selectors.EVENT_READ | selectors.EVENT_WRITE, connection
        )
        self._write(connection)

    def _disconnect(self, connection: Connection, reason: str, by_us: bool = False) -> None:
        if connection.channel.fileno() < 0:
            return
        self._selector.unregister(connection.channel)
        connection.channel.close()
        if not by_us and not self._session.has_ended(connection.rank):
            self.hung_up.add(connection.rank)
        self._session.end(connection.rank, reason)
