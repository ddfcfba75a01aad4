"""The server's side of one rank's connection: bytes in, frames out."""

from __future__ import annotations

import socket

from course_lib.ranks.fabric.operation import Operation
from course_lib.ranks.fabric_socket import frames
from course_lib.ranks.fabric_socket.frames import Type

CHUNK = 1 << 18
"""Bytes that are read from one rank before the next has its turn."""


class Connection:
    """One connection: bytes that have come, bytes that have yet to go, and what is not over."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.rank: int | None = None
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
        """Bytes that are here because of it."""
        return self.held + len(self.body) + len(self.outgoing)

    def receive(self, limit: int) -> tuple[int, Type | None]:
        """Read once; return the bytes read, 0 if it hung up, and the type of a complete frame.

        The frame's body is then in `body`.

        Raises:
            FrameError: what came is no frame, or is longer than `limit`.
            BlockingIOError: nothing has come.

        """
        if self.type is None:
            data = self.channel.recv(frames.HEADER.size - len(self.header))
            self.header += data
            if len(self.header) < frames.HEADER.size:
                return len(data), None
            # Only who has said who it is may send more than that.
            limit = limit if self.rank is not None else 64
            self.type, self.length = frames.read_header(bytes(self.header), limit)
            self.header, self.body = bytearray(), bytearray()
            self.frames += 1
        else:
            # A long frame that is only announced takes no memory.
            data = self.channel.recv(min(CHUNK, self.length - len(self.body)))
            self.body += data
        if not data or len(self.body) < self.length:
            return len(data), None
        kind, self.type = self.type, None
        return len(data), kind
