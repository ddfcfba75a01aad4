"""A fabric at the end of a Unix socket, for ranks that are processes and need not be trusted.

Every connection is one rank. The server reads frames and checks them. It answers a waiting rank
when the event that the rank waits for has happened. A rank that breaks the protocol or closes its
connection counts as ended: ranks that wait for it are told so, and all others go on. The server
cannot distinguish a rank that hangs from one that computes for a long time. Such a rank delays its
own run until the time limit.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from course_lib.ranks.costs.network import Network
from course_lib.ranks.explain.errors import RanksError, RankState
from course_lib.ranks.explain.failure import timed_out
from course_lib.ranks.simulated.fabric import Fabric
from course_lib.ranks.simulated.socket_frames import LOOSE, Bounds, FrameError, OverBoundError
from course_lib.ranks.simulated.socket_session import CHUNK, Connection, Session


class FabricServer:
    """Serves one run of `world_size` ranks.

    `serve` serves the whole run. A caller that also waits for other things selects on `fileno`
    instead, and calls `turn` whenever it is readable.

    Args:
        path: the path of the socket, which must not exist yet and to which only this user can
            connect; or one connection per rank, in rank order. Such ranks need no secret.
        world_size: K.
        network: what messages cost.
        bounds: how much the ranks may ask for.
        computes: for each rank, seconds → how often it may report a computation of that length.
            Other reports are not counted, and the rank does not learn its clock. ``None``: all
            reports count.

    Attributes:
        secrets: per rank, the 16 bytes that it must send.
        fabric: the fabric, with its clocks and events.
        hung_up: the ranks that closed their connection before they reported their end.

    """

    def __init__(
        self,
        path: str | Sequence[socket.socket],
        world_size: int,
        network: Network,
        *,
        bounds: Bounds = LOOSE,
        computes: Sequence[Mapping[float, int]] | None = None,
    ) -> None:
        self._session = Session(
            world_size,
            network,
            self._send,
            bounds=bounds,
            computes=computes,
        )
        self.hung_up: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self._path = path if isinstance(path, str) else None
        if isinstance(path, str):
            self._listen(path, world_size)
        else:
            for rank, channel in enumerate(path):
                channel.setblocking(False)
                self._selector.register(
                    channel, selectors.EVENT_READ, self._session.expect(Connection(channel), rank)
                )

    def _listen(self, path: str, world_size: int) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(world_size + 8)
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ, None)

    @property
    def fabric(self) -> Fabric:
        """The fabric: its clocks and events."""
        return self._session.fabric

    @property
    def secrets(self) -> list[bytes]:
        """Per rank, the 16 bytes that it must send."""
        return self._session.secrets

    def serve(self, timeout: float, alive: Callable[[], bool] = lambda: True) -> None:
        """Serve until every rank has ended.

        Args:
            timeout: seconds for the whole run.
            alive: called now and then; when it returns false, ranks that never connected count as
                ended.

        Raises:
            RankError: a rank raised, closed its connection or broke the protocol.
            DeadlockError: the ranks wait for one another, or left communication behind.
            MismatchError: the ranks entered different collectives.
            RankTimeout: the run outlasted `timeout`.

        """
        deadline = time.monotonic() + timeout
        session = self._session
        try:
            while not session.over:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise timed_out("run", timeout, session.states())
                self.turn(min(left, 0.1))
                if not alive():
                    session.end_absent()
                    session.settle()
            session.raise_outcome()
        finally:
            self.close()

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
            if key.data is None:
                self._accept()
                continue
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
        """Close all connections and remove the socket."""
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        if self._path is not None:
            with suppress(FileNotFoundError):
                os.unlink(self._path)

    def _accept(self) -> None:
        with suppress(OSError):
            channel, _ = self._listener.accept()
            channel.setblocking(False)
            if len(self._selector.get_map()) > 4 * self._session.world_size + 16:
                channel.close()  # far more connections than ranks: this one is not a rank's
                return
            self._selector.register(channel, selectors.EVENT_READ, Connection(channel))

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
        if connection.rank is None:
            return
        if not by_us and not self._session.has_ended(connection.rank):
            self.hung_up.add(connection.rank)
        self._session.end(connection.rank, reason)
