"""The pipe between the notebook and one rank: Python objects, large ones in shared memory.

An object becomes what cloudpickle makes of it and, beside that, the bytes of its tensors and arrays
as they lie in memory (pickle protocol 5, PEP 574). A small object travels through the socket. A
large one is written once into a nameless file in memory, whatever the number of readers: the
socket carries the file's descriptor, and the reader maps the file, without a copy.

A message is a few objects that belong together. The reader unpickles each of them when it likes.

To the rank, for each call: a `CallHead`; the surroundings, or None if they have not changed; what
all ranks share of the call; and what this rank alone gets of it, a list.

From the rank: an `AnswerHead` and, with `DISPLAY`, a bundle, any number of times. With every other
kind, two more objects: the log, as tuples of what an `Event` has, and the result or the `Failure`.
`READY` comes once, before the first call; each call has one of the others.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import socket
import struct
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from course_lib.ranks.explain.pickling import Pickler
from course_lib.ranks.memory import anonymous_file
from course_lib.ranks.trace.event import Event

_INLINE = 1 << 13
"""Bytes that surely fit into the socket's buffer, so that sending them never waits."""
_ALIGN = 64
_COUNT = struct.Struct("<B")  # objects in the message
_HEADER = struct.Struct("<QI?")  # of an object: bytes in all, parts, whether in a file
_MAX_FDS = 8

Read = Callable[[], Any]
"""Unpickles an object that has arrived."""


@dataclass(slots=True, weakref_slot=True)
class Packed:
    """An object as bytes: inline, or in a file in memory that is closed with `close`."""

    size: int
    parts: int
    """The pickle and the buffers beside it."""
    inline: bytes = b""
    fd: int = -1

    _free: Callable[[], Any] | None = None

    @classmethod
    def in_file(cls, size: int, parts: int, fd: int) -> Packed:
        """Return what lies in the file `fd`."""
        packed = cls(size, parts, b"", fd)
        packed._free = weakref.finalize(packed, os.close, fd)
        return packed

    def close(self) -> None:
        """Free the file, if there is one; it is also freed with the object."""
        if self._free is not None:
            self._free()


class _Pickler(Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and _is_plain(obj):
            # A transposed tensor stays one, as one in `channels_last`; gaps are left out.
            order = sorted(range(obj.dim()), key=obj.stride, reverse=True)
            data = obj.detach().to("cpu").permute(order).contiguous()
            return _tensor, (pickle.PickleBuffer(_bytes_of(data)), data.dtype, tuple(data.shape),
                             order, obj.requires_grad)  # fmt: skip
        return super().reducer_override(obj)


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and not tensor.__dict__
        and tensor.numel() > 0
    )


def _bytes_of(tensor: torch.Tensor) -> Any:
    buffer = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    buffer._tensor = tensor  # type: ignore[attr-defined]  # keeps the memory alive
    return buffer


def _tensor(
    buffer: Any, dtype: torch.dtype, shape: tuple[int, ...], order: list[int], requires_grad: bool
) -> torch.Tensor:
    data = torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(shape)
    back = sorted(range(len(order)), key=order.__getitem__)
    return data.permute(back).requires_grad_(requires_grad)


class _Spool:
    """Takes the pickle: in a buffer as long as it is small, then in a file in memory."""

    def __init__(self) -> None:
        self.buffer: bytearray | None = bytearray()
        self.fd = -1
        self.size = 0

    def write(self, data: Any) -> None:
        view = memoryview(data)
        self.size += view.nbytes
        if self.buffer is not None and self.size <= _INLINE:
            self.buffer += view
            return
        if self.buffer is not None:
            self.fd, buffered, self.buffer = anonymous_file("call"), self.buffer, None
            _write_all(self.fd, memoryview(buffered))
        _write_all(self.fd, view.cast("B"))

    def pad(self) -> None:
        self.write(bytes(-self.size % _ALIGN))


def _write_all(fd: int, view: memoryview) -> None:
    while view:
        view = view[os.write(fd, view[: 1 << 30]) :]


def pack(value: Any) -> Packed:
    """Return `value` as bytes. Tensors arrive on the CPU, without the graph that made them.

    Raises whatever pickling raises.
    """
    buffers: list[pickle.PickleBuffer] = []
    spool = _Spool()
    try:
        _Pickler(spool, protocol=5, buffer_callback=buffers.append).dump(value)
        sizes = [spool.size]
        for buffer in buffers:
            view = buffer.raw()
            spool.pad()
            spool.write(view)
            sizes.append(len(view))
        if buffers:
            spool.write(struct.pack(f"<{len(sizes)}Q", *sizes))
    except BaseException:
        if spool.fd >= 0:
            os.close(spool.fd)
        raise
    if spool.buffer is None:
        return Packed.in_file(spool.size, len(sizes), spool.fd)
    return Packed(spool.size, len(sizes), bytes(spool.buffer))


def _unpack(data: Any, size: int, parts: int) -> Any:
    """Return what `data` is, the bytes of a `Packed` of this size with so many parts."""
    view = memoryview(data)[:size]
    if parts == 1:
        return pickle.loads(view)
    sizes = struct.unpack(f"<{parts}Q", view[size - 8 * parts :])
    at, buffers = sizes[0], []
    for length in sizes[1:]:
        at += -at % _ALIGN
        buffers.append(view[at : at + length])
        at += length
    return pickle.loads(view[: sizes[0]], buffers=buffers)


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

    def fileno(self) -> int:
        """Return the socket's descriptor, for a selector."""
        return self._socket.fileno()

    def send(self, *objects: Packed) -> None:
        """Send a message."""
        headers = [_HEADER.pack(each.size, each.parts, each.fd >= 0) for each in objects]
        inline = [each.inline for each in objects]
        data = b"".join([_COUNT.pack(len(objects)), *headers, *inline])
        if fds := [each.fd for each in objects if each.fd >= 0]:
            data = data[socket.send_fds(self._socket, [data], fds) :]
        self._socket.sendall(data)

    def receive(self) -> list[Read]:
        """Wait for the next message; return what unpickles each of its objects.

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
            headers = self._take(_COUNT.unpack(first)[0] * _HEADER.size)
            for size, parts, in_file in _HEADER.iter_unpack(headers):
                if in_file:
                    body: Any = mmap.mmap(next(files), size, access=self._access)
                else:
                    body = bytearray(self._take(size))  # a tensor in it can be written to
                objects.append(partial(_unpack, body, size, parts))
        finally:
            for fd in fds:
                os.close(fd)
        return objects

    def _take(self, size: int) -> bytes:
        """Read so many bytes."""
        data = b""
        while len(data) < size:
            chunk = self._socket.recv(size - len(data), socket.MSG_WAITALL)
            if not chunk:
                raise EOFError("the other end is gone")
            data += chunk
        return data

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


READY, DISPLAY, RESULT, FAILURE, GIVEN_UP = range(5)
"""Kinds of answers."""


class CallHead(NamedTuple):
    """Tells a rank, before a call, what is not the notebook's."""

    call: int
    generation: int
    """How many calls were given up before it."""
    check_nan: bool


class AnswerHead(NamedTuple):
    """Tells the parent how a call ended; its log and its result follow."""

    kind: int
    dropped: int = 0
    """Events that found no room in the log."""
    joined: bool = True
    """Whether the rank still has its process groups."""


@dataclass(frozen=True)
class Answer:
    """The answer of a rank, as it has arrived: unpickled as far as it is needed."""

    head: AnswerHead
    log: Read
    value: Read
    """Of the result, or of the `Failure`."""

    def events(self) -> list[Event]:
        """Return the log; it is unpickled only here, for nobody looks at most of them."""
        return [Event(*event) for event in self.log()]
