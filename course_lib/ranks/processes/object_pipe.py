"""The pipe between the notebook and one rank: Python objects, large ones in shared memory.

A message is a few objects that belong together, packed as in `memory`. A small object travels
through the socket. For a large one, only the descriptor of its file does. The reader unpickles each
object when it needs it.

For each call, the rank gets a `CallHead`; the surroundings, or None if they have not changed; the
part of the call that all ranks share; and a list of what only this rank gets.

The rank sends messages that begin with an `AnswerHead`. After the kind `DISPLAY`, which may come
any number of times, a bundle follows. After every other kind, two objects follow: the log, as
tuples of the fields of an `Event`, and the result or the `Failure`. `READY` comes once, before the
first call. Each call ends with one message of another kind.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from course_lib.ranks.memory import Packed, map_file, unpack
from course_lib.ranks.trace.event import Event
from course_lib.ranks.wire import receive_exactly

_COUNT = struct.Struct("<B")  # number of objects in the message
_HEADER = struct.Struct("<QI?")  # of an object: total bytes, number of parts, whether in a file
_MAX_FDS = 8

Read = Callable[..., Any]
"""Unpickles an object that has arrived; its argument is that of `Packed.read`."""


class ObjectPipe:
    """One end of the pipe.

    Args:
        sock: a connected Unix stream socket.
        private: whether the reader may change received objects without other readers seeing it;
            costs a copy of what is changed.

    """

    def __init__(self, sock: socket.socket, *, private: bool) -> None:
        self._socket = sock
        self._private = private

    def fileno(self) -> int:
        """Return the socket's descriptor, for a selector."""
        return self._socket.fileno()

    def send(self, *objects: Packed) -> None:
        """Send a message."""
        headers = [_HEADER.pack(packed.size, packed.parts, packed.fd >= 0) for packed in objects]
        inline = [packed.inline for packed in objects]
        data = b"".join([_COUNT.pack(len(objects)), *headers, *inline])
        if fds := [packed.fd for packed in objects if packed.fd >= 0]:
            data = data[socket.send_fds(self._socket, [data], fds) :]
        self._socket.sendall(data)

    def receive(self) -> list[Read]:
        """Wait for the next message; return one function per object, which unpickles it.

        Raises:
            EOFError: the other end is gone.

        """
        # Descriptors come with the first byte of the message that they belong to.
        first, fds, _, _ = socket.recv_fds(self._socket, _COUNT.size, _MAX_FDS)
        if not first:
            raise EOFError("the other end is gone")
        objects: list[Read] = []
        files = iter(fds)
        try:
            headers = receive_exactly(self._socket, _COUNT.unpack(first)[0] * _HEADER.size)
            for size, parts, in_file in _HEADER.iter_unpack(headers):
                if in_file:
                    body: Any = map_file(next(files), size, private=self._private)
                else:
                    body = receive_exactly(self._socket, size)  # a tensor in it can be written to
                objects.append(partial(unpack, body, size, parts))
        finally:
            for fd in fds:
                os.close(fd)
        return objects

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


READY, DISPLAY, RESULT, FAILURE, GIVEN_UP = range(5)
"""Kinds of answers."""


class CallHead(NamedTuple):
    """Tells a rank about the next call what does not come from the notebook."""

    call: int
    """The number of the call."""
    generation: int
    """How many calls were given up before this one."""


class AnswerHead(NamedTuple):
    """Tells the parent how a call ended; its log and its result follow."""

    kind: int
    dropped: int = 0
    """Number of events for which the log had no room."""
    joined: bool = True
    """Whether the rank still has its process groups, and can use them."""


@dataclass(frozen=True)
class Answer:
    """The answer of a rank as it has arrived; its parts are unpickled only when needed."""

    head: AnswerHead
    log: Read
    value: Read
    """Reads the result, the `Failure`, or the notes on what ended a given-up call."""

    def events(self) -> list[Event]:
        """Return the log. It is unpickled only here, because most logs are never read."""
        return [Event(*event) for event in self.log()]
