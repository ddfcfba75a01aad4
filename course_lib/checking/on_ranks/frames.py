"""Frames on a stream socket, which carry plain values between an examiner and student code.

A frame is a header and a payload, which `wire` has encoded::

    magic | kind, 4 bytes | payload length, 8 bytes | payload

The reader checks the length against its limit before it allocates anything.
"""

import socket
import struct
from collections.abc import Iterator
from enum import IntEnum

from course_lib.checking.on_ranks.wire import MAX_BYTES, WireError

_FRAME = struct.Struct("<4sIQ")
_FRAME_MAGIC = b"DDPf"
_CHUNK = 2**20


class Frame(IntEnum):
    """Kinds of frames between an examiner and the processes that run student code."""

    CELL = 1
    """To the notebook process: run a cell."""
    TAKE = 2
    """To the notebook process: hand over a function."""
    DONE = 3
    """From the notebook process: the answer. From a node: how one of its ranks ended."""
    FUNCTION = 4
    """From the notebook process, passed on to the ranks: a student's function, as bytes that only
    ranks may read."""
    INPUT = 5
    """To a rank: its input; it then runs the program."""
    OUTPUT = 6
    """From a rank: what the program returned."""
    FAILURE = 7
    """From a rank: the exception that the program raised, as texts."""
    TOUCHED = 10
    """From a rank, before its output: the buffers that it used before their ``wait()``; see
    `Observed.touched`."""
    READY = 9
    """From any of these processes: it has everything that it needs; now the student's code runs."""
    PROGRAM = 8
    """To a rank: the check's program."""


def header(kind: int, payload: bytes) -> bytes:
    """Return the header of the payload. ``kind`` is defined by the protocol, in [0, 2**32)."""
    return _FRAME.pack(_FRAME_MAGIC, kind, len(payload))


def send_frame(sock: socket.socket, kind: int, payload: bytes) -> None:
    """Write one frame to a blocking stream socket."""
    sock.sendall(header(kind, payload))
    sock.sendall(payload)


def recv_frame(sock: socket.socket, max_bytes: int = MAX_BYTES) -> tuple[int, bytes]:
    """Read one frame from a blocking stream socket and return its kind and payload.

    Raises:
        EOFError: the other end closed the stream between two frames.
        WireError: the other end closed the stream inside a frame, sent something that is not a
            frame, or announced more than ``max_bytes``; then no memory is allocated.
    """
    start = _receive(sock, _FRAME.size)
    if not start:
        raise EOFError("the stream has ended")
    if len(start) < _FRAME.size:
        raise WireError("the stream ended inside a frame's header")
    kind, length = _parse_header(start, max_bytes)
    payload = _receive(sock, length)
    if len(payload) < length:
        raise WireError(f"the stream ended after {len(payload)} of a frame's {length} bytes")
    return kind, payload


def _receive(sock: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        chunk = sock.recv(min(size - len(received), _CHUNK))
        if not chunk:
            break
        received += chunk
    return bytes(received)


def _parse_header(header: bytes | bytearray, max_bytes: int) -> tuple[int, int]:
    magic, kind, length = _FRAME.unpack_from(header)
    if magic != _FRAME_MAGIC:
        raise WireError("the bytes do not begin like a frame")
    if length > max_bytes:
        raise WireError(
            f"a message of {length} bytes is too large: at most {max_bytes} are accepted"
        )
    return kind, length


class FrameReader:
    """Reads frames from a stream that arrives in pieces, for a process that reads many sockets.

    A reader never holds more than one frame of ``max_bytes`` and the last piece. After a
    ``WireError`` the stream has no meaning any more, and every further ``feed`` raises the error
    again.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._error: WireError | None = None

    @property
    def inside_frame(self) -> bool:
        """Whether a frame has begun but not ended, so that an end of the stream would cut it."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Add the next piece of the stream; yield the frames that are complete now.

        Raises:
            WireError: after the last frame, what arrived is not a frame, or announces more than
                ``max_bytes``.
        """
        if self._error is not None:
            raise self._error
        self._buffer += data
        while len(self._buffer) >= _FRAME.size:
            try:
                kind, length = _parse_header(self._buffer, self._max_bytes)
            except WireError as error:
                self._error = error
                self._buffer.clear()
                raise
            end = _FRAME.size + length
            if len(self._buffer) < end:
                break
            payload = bytes(memoryview(self._buffer)[_FRAME.size : end])
            del self._buffer[:end]
            yield kind, payload
