"""Exchange messages with one student process, within deadlines that the process cannot move."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from autograder.examination.budget import LOOK_EVERY, Deadline
from course_lib.ranks.wire import PIECE, Reader, WireError, encode

MAX_ANSWER = 64 * 2**20
START_SECONDS = 60.0
"""Seconds that one of our processes may take to start. They never count as a student's time."""
SHORTEST_WAIT = 0.01
"""Seconds of the shortest wait, because a deadline may move further away after it was read."""

Message = tuple[str, Any]
"""The kind of a message, and its value."""


class Channel:
    """Our end of a socket pair. It never blocks: it is read and written only when it is ready.

    Attributes:
        socket: the socket.
        messages: messages that have arrived and are not processed yet.
        ready: whether the process has started; before that, no student code has run.
        ended: whether the other end has closed the connection.

    """

    def __init__(self, sock: socket.socket, max_answer: int = MAX_ANSWER) -> None:
        self.socket = sock
        self.messages: list[Message] = []
        self.ready = False
        self.ended = False
        sock.setblocking(False)
        self._reader = Reader(max_answer)
        self._error: WireError | None = None
        self._outgoing: list[memoryview] = []

    def send(self, kind: str, value: Any) -> None:
        """Send a message as far as the socket accepts it now, and keep the rest."""
        self.queue_encoded(encode((kind, value)))
        self.write()

    def queue_encoded(self, message: bytes) -> None:
        """Add a message that may be shared with other channels."""
        self._outgoing.append(memoryview(message))

    @property
    def events(self) -> int:
        """The events to wait for."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)

    @property
    def held(self) -> int:
        """Bytes of messages that are not completely received or sent."""
        return self._reader.held + sum(map(len, self._outgoing))

    def serve(self) -> None:
        """Write as much as the socket accepts, and read the data that has arrived."""
        self.write()
        try:
            data = self.socket.recv(PIECE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.ended = True
        elif self._error is None:
            try:
                for message in self._reader.feed(data):
                    match message:
                        case (str(kind), value):
                            self.messages.append((kind, value))
                        case _:
                            raise WireError("a message without a kind")
            except WireError as error:
                self._error = error
            if not self.ready and self.messages and self.messages[0][0] == "ready":
                self.ready = bool(self.messages.pop(0))

    def write(self) -> None:
        """Write as much as the socket accepts."""
        try:
            while self._outgoing:
                sent = self.socket.send(self._outgoing[0])
                self._outgoing[0] = self._outgoing[0][sent:]
                if not self._outgoing[0]:
                    self._outgoing.pop(0)
        except BlockingIOError:
            pass
        except OSError:
            self._outgoing.clear()

    def take(self) -> Iterator[Message]:
        """Yield the messages that have arrived, and forget them.

        Raises:
            WireError: after the last message, data has arrived that is none, or too long. Student
                code has sent it, because our own processes send a correct sign of readiness first.

        """
        while self.messages:
            yield self.messages.pop(0)
        if self._error is not None:
            raise self._error

    def wait_until_ready(self) -> bool:
        """Send what is queued until the process has started; return whether it did so in time.

        Messages that arrive after the sign of readiness are kept for the next caller.
        """
        until = time.monotonic() + START_SECONDS
        self._serve_until(lambda: self.ready, lambda: until - time.monotonic())
        return self.ready

    def ask(self, deadline: Deadline, look: Callable[[], object]) -> Message:
        """Send what is queued and return the next message; call `look` now and then.

        Raises:
            TimeoutError: the message has not arrived completely by `deadline`.
            EOFError: the other end closed the connection before.
            WireError: the data is no message, or too long.

        """
        self._serve_until(lambda: bool(self.messages), lambda: deadline.left, look)
        if self.messages:
            return self.messages.pop(0)
        if self._error is not None:
            raise self._error
        raise EOFError("the stream has ended") if self.ended else TimeoutError

    def _serve_until(
        self,
        arrived: Callable[[], bool],
        left: Callable[[], float],
        look: Callable[[], object] = lambda: None,
    ) -> None:
        """Serve until something has arrived, nothing more can arrive, or no time is left."""
        looked = time.monotonic()
        while not (arrived() or self.ended or self._error) and (seconds_left := left()) > 0:
            if ready([self], seconds_left):
                self.serve()
            if time.monotonic() - looked > LOOK_EVERY:
                looked = time.monotonic()
                look()

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()


def ready(channels: Iterable[Channel], left: float) -> list[Channel]:
    """Wait for channels that can be served, but not longer than a deadline allows.

    The deadline is `left` seconds away.
    """
    with selectors.DefaultSelector() as selector:
        for channel in channels:
            if channel.socket.fileno() >= 0:  # it is not closed
                selector.register(channel.socket, channel.events, channel)
        seconds = min(LOOK_EVERY, max(SHORTEST_WAIT, left))
        return [key.data for key, _ in selector.select(seconds)]
