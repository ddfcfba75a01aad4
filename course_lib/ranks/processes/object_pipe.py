"""The pipe between the notebook and one rank: what `packing` has packed, and notes.

Small objects travel through the socket; of large ones, the descriptor of the file that they are in.
A message may carry a *note*, a few bytes in front of the object, so that what belongs together is
one message.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from course_lib.ranks.processes.packing import Packed, unpack

_HEADER = struct.Struct("<QIB?")  # bytes in all, parts, bytes of the note, whether in a file
_HEAD = _HEADER.size
_READ = 1 << 14
_ONE_FD = socket.CMSG_LEN(struct.calcsize("i"))

Frames = list[tuple[bytes, int]]
"""Bytes to send, each with the descriptor that goes with them, or -1."""


def frames(*messages: Packed, note: bytes = b"") -> Frames:
    """Return messages as what is sent, in order: to any number of ranks.

    `note`: goes with the first one; at most 255 bytes.
    """
    found: Frames = []
    waiting = b""  # small ones go together: every system call wakes the reader
    for packed in messages:
        header = _HEADER.pack(packed.size, packed.parts, len(note), packed.fd >= 0) + note
        note = b""
        if packed.fd < 0:
            waiting += header + packed.inline
            continue
        if waiting:
            found.append((waiting, -1))
            waiting = b""
        found.append((header, packed.fd))
    if waiting:
        found.append((waiting, -1))
    return found


class ObjectPipe:
    """One end of the pipe.

    Args:
        sock: a connected Unix stream socket.
        private: whether what arrives may be changed without the other readers seeing it; costs
            a copy of what is changed.

    """

    def __init__(self, sock: socket.socket, *, private: bool) -> None:
        self._socket = sock
        self._access = mmap.ACCESS_COPY if private else mmap.ACCESS_WRITE
        # What has come and was not yet asked for: one system call takes several small messages.
        self._bytes = b""
        self._fds: deque[int] = deque()

    def fileno(self) -> int:
        """Return the socket's descriptor, for a selector; see also `has_more`."""
        return self._socket.fileno()

    def has_more(self) -> bool:
        """Return whether (the beginning of) a message was read already: no selector tells."""
        return bool(self._bytes)

    def send(self, *messages: Packed, note: bytes = b"") -> None:
        """Send what is packed, in order; with the first message, a note."""
        self.send_frames(frames(*messages, note=note))

    def send_frames(self, ready: Frames) -> None:
        """Send what `frames` has made."""
        for data, fd in ready:
            if fd < 0:
                self._socket.sendall(data)
            else:
                socket.send_fds(self._socket, [data], [fd])

    def receive(self) -> tuple[bytes, Callable[[], Any]]:
        """Take the next message out of the pipe: its note, and a function that unpickles the rest.

        Raises:
            EOFError: the other end is gone.

        """
        if len(self._bytes) < _HEAD:
            self._fill(_HEAD)
        size, parts, noted, in_file = _HEADER.unpack_from(self._bytes)
        begin = _HEAD + noted
        end = begin if in_file else begin + size
        if len(self._bytes) < end:
            self._fill(end)
        have = self._bytes
        self._bytes = have[end:]
        if in_file:
            fd = self._fds.popleft()
            try:
                body: Any = mmap.mmap(fd, size, access=self._access)
            finally:
                os.close(fd)
        else:
            body = have[begin:end]
            if parts > 1:
                body = bytearray(body)  # a tensor in it can be written to
        return have[_HEAD:begin], partial(unpack, body, size, parts)

    def _fill(self, size: int) -> None:
        """Read until so many bytes are there."""
        while len(self._bytes) < size:
            try:  # noqa: SIM105  # on the way of every call
                self._read()
            except BlockingIOError:
                pass  # see `be_patient`: a message that began will end

    def _read(self) -> None:
        # A descriptor never comes later than the first byte of the header it belongs to.
        # (This is `socket.recv_fds`, which takes longer to look for one than to read.)
        chunk, beside, _, _ = self._socket.recvmsg(_READ, _ONE_FD)
        for _, _, fds in beside:
            self._fds.extend(memoryview(fds).cast("i"))
        if not chunk:
            raise EOFError("the other end is gone")
        self._bytes = self._bytes + chunk if self._bytes else chunk

    def arrives(self) -> bool:
        """Wait for the beginning of a message; return whether it came in time."""
        if not self._bytes:
            try:
                self._read()
            except BlockingIOError:
                return False
        return True

    def be_patient(self, seconds: float) -> None:
        """Let `arrives` wait so long at most."""
        whole = int(seconds)
        limit = struct.pack("@ll", whole, int(1e6 * (seconds - whole)))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def close(self) -> None:
        """Close this end."""
        while self._fds:
            os.close(self._fds.popleft())
        self._socket.close()
