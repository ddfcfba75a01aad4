"""Read from sockets: lines of JSON with file descriptors, or an exact number of bytes."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any

_MAX_FDS = 64
_PIECE = 1 << 16


class JsonLines:
    """Messages over a Unix socket: each is a line of JSON. Some come with file descriptors.

    Args:
        sock: a connected Unix stream socket.
        limit: length of the longest allowed line, in bytes.
        takes_fds: whether descriptors are accepted. If not, the system closes any that arrive.

    """

    def __init__(self, sock: socket.socket, limit: int, *, takes_fds: bool = False) -> None:
        self._socket = sock
        self._limit = limit
        self._takes_fds = takes_fds
        self._data = b""
        self._fds: list[int] = []

    def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send a message together with copies of these descriptors.

        The reader takes as many descriptors as the message says under ``"fds"``.
        """
        line = json.dumps(message).encode() + b"\n"
        if fds:
            line = line[socket.send_fds(self._socket, [line], list(fds)) :]
        self._socket.sendall(line)

    def read(self) -> bool:
        """Read the data that has arrived; return whether the other end is still connected."""
        if self._takes_fds:
            piece, fds, _, _ = socket.recv_fds(self._socket, _PIECE, _MAX_FDS)
            self._fds += fds
        else:
            piece = self._socket.recv(_PIECE)
        self._data += piece
        return bool(piece)

    def take(self) -> list[tuple[dict[str, Any], list[int]]]:
        """Return the messages that have arrived in full, in order, each with its descriptors.

        Raises:
            ValueError: a line is not a JSON object, or is too long.

        """
        *lines, self._data = self._data.split(b"\n")
        if len(self._data) > self._limit:
            raise ValueError(f"a line of more than {self._limit} bytes")
        taken = []
        for line in lines:
            message = json.loads(line)
            if not isinstance(message, dict):
                raise ValueError("a line that is no message")
            count = message.get("fds", 0) if self._takes_fds else 0
            taken.append((message, self._fds[:count]))
            del self._fds[:count]
        return taken


def receive_exactly(sock: socket.socket, size: int) -> bytearray:
    """Wait until `size` bytes have arrived and return them.

    Raises:
        EOFError: the other end has closed the connection.

    """
    data, filled = bytearray(size), 0
    while filled < size:
        try:
            count = sock.recv_into(memoryview(data)[filled:])
        except ConnectionError:
            count = 0
        if not count:
            raise EOFError("the other end is gone")
        filled += count
    return data
