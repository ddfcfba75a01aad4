"""A line to one process of a student's: frames out and in, with deadlines that nothing moves."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable

from autograder.examination.budget import LOOK_EVERY, Deadline
from course_lib.checking.on_ranks.frames import Frame, FrameReader, header

MAX_ANSWER = 64 * 2**20
START_SECONDS = 60.0
"""For so long a process of ours may take to stand. No student pays for it."""
SHORTEST_WAIT = 0.01
"""Seconds: a deadline may move away while it is looked at, so nobody waits for it any shorter."""
_PIECE = 1 << 20


def wait_at_most(left: float) -> float:
    """Return for how long to wait for news where `left` seconds must still count."""
    return min(LOOK_EVERY, max(SHORTEST_WAIT, left))


class Channel:
    """Our end of a socket pair. Never blocks: it is read and written when it is ready.

    Attributes:
        socket: for a selector.
        frames: those that have come and were not taken yet.
        ready: whether the process stands; before that, nothing of a student's has run.
        ended: whether the other end has hung up.

    """

    def __init__(self, sock: socket.socket, max_answer: int = MAX_ANSWER) -> None:
        self.socket = sock
        self.frames: list[tuple[int, bytes]] = []
        self.ready = False
        self.ended = False
        sock.setblocking(False)
        self._reader = FrameReader(max_answer)
        self._outgoing: list[memoryview] = []

    def queue(self, kind: Frame, payload: bytes) -> None:
        """Have a frame sent."""
        self._outgoing.append(memoryview(header(kind, payload)))
        if payload:
            self._outgoing.append(memoryview(payload))

    @property
    def events(self) -> int:
        """What to select for."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)

    def serve(self) -> None:
        """Write what can be written and read what has come.

        Raises:
            WireError: what came is not a frame, or too long.

        """
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
        try:
            data = self.socket.recv(_PIECE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self.frames += self._reader.feed(data)
            if not self.ready and self.frames and self.frames[0][0] == Frame.READY:
                self.ready = bool(self.frames.pop(0))
        else:
            self.ended = True

    def wait_until_ready(self, seconds: float = START_SECONDS) -> bool:
        """Send what is queued until the process stands; return whether it does in so many seconds.

        The frames that follow stay for whoever asks next.
        """
        until = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self.socket, self.events)
            while not (self.ready or self.ended):
                if (left := until - time.monotonic()) <= 0:
                    return False
                if selector.select(left):
                    self.serve()
                selector.modify(self.socket, self.events)
        return self.ready

    def ask(self, deadline: Deadline, look: Callable[[], object]) -> tuple[int, bytes]:
        """Send what is queued and return the next frame that comes; `look` now and then.

        Raises:
            TimeoutError: the whole of it has not come by `deadline`.
            EOFError: the other end hung up before.
            WireError: what came is not a frame, or too long.

        """
        looked = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self.socket, self.events)
            while not self.frames:
                if self.ended:
                    raise EOFError("the stream has ended")
                left = deadline.left
                if left <= 0:
                    raise TimeoutError
                if selector.select(wait_at_most(left)):
                    self.serve()
                if time.monotonic() - looked > LOOK_EVERY:
                    looked = time.monotonic()
                    look()
                selector.modify(self.socket, self.events)
        return self.frames.pop(0)

    def close(self) -> None:
        """Hang up."""
        self.socket.close()
