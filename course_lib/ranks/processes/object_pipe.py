"""The pipe between the notebook and one rank: Python objects, large ones through shared memory.

An object becomes a pickle and, beside it, the bytes of its tensors and arrays as they lie in
memory (pickle protocol 5, PEP 574). Small ones travel through the socket. Large ones are written
once into a nameless file in memory, whose descriptor travels; the reader maps it, without a copy.
A few bytes that need no pickling go as they are: see `plain`.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import pickle
import socket
import struct
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import cloudpickle
import torch

from course_lib.ranks.board.memory import anonymous_file

_INLINE = 1 << 13
"""Bytes that surely fit into the socket's buffer, so that sending them never waits."""
_HEADER = struct.Struct("<QI?")  # bytes in all, number of parts, whether they are in a file
_HEAD = _HEADER.size
_READ = 1 << 16
_ALIGN = 64
_ONE_FD = socket.CMSG_LEN(struct.calcsize("i"))
_CLOUDPICKLE = cloudpickle.cloudpickle.__name__
_SIMPLE = (type(None), bool, int, float, str)
"""What any pickler packs alike, so that the quickest will do."""


@dataclass(slots=True, weakref_slot=True)
class Packed:
    """An object as bytes: inline, or in a file in memory that is closed with `close`."""

    size: int
    parts: int
    """The pickle and the buffers beside it; 0: the bytes themselves are the message."""
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


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is FunctionType and obj.__module__ == _CLOUDPICKLE:
            # Three for every function of a cell. They go by name, as anything that is imported;
            # cloudpickle would look that up each time, for a third of an empty call's pickling.
            return NotImplemented
        if kind is torch.Tensor and _is_plain(obj):
            data = obj.detach().to("cpu").contiguous()
            return _tensor, (pickle.PickleBuffer(_bytes_of(data)), obj.dtype, tuple(obj.shape),
                             obj.requires_grad)  # fmt: skip
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
    buffer: Any, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool
) -> torch.Tensor:
    flat = torch.frombuffer(buffer, dtype=torch.uint8)
    return flat.view(dtype).view(shape).requires_grad_(requires_grad)


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


def plain(data: bytes) -> Packed:
    """Return a message that is received as these bytes."""
    if len(data) <= _INLINE:
        return Packed(len(data), 0, data)
    fd = anonymous_file("call")
    _write_all(fd, memoryview(data))
    return Packed.in_file(len(data), 0, fd)


def pack(value: Any) -> Packed:
    """Return `value` as bytes. Tensors arrive on the CPU, without the graph that made them.

    Raises whatever pickling raises.
    """
    if type(value) in _SIMPLE:
        data = pickle.dumps(value, protocol=5)
        if len(data) <= _INLINE:
            return Packed(len(data), 1, data)
    buffers: list[pickle.PickleBuffer] = []
    spool = _Spool()
    try:
        pickler = _Pickler(spool, protocol=5, buffer_callback=buffers.append)
        pickler.dump(value)
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


def to_bytes(value: Any) -> bytes:
    """Return `value` as `pack` packs it, but in one piece that ``pickle.loads`` reads."""
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(value)
    return file.getvalue()


def _unpack(data: Any, size: int, parts: int) -> Any:
    if parts == 1:  # as mostly
        return pickle.loads(data)
    if parts == 0:
        return data
    view = memoryview(data)[:size]
    sizes = struct.unpack(f"<{parts}Q", view[size - 8 * parts :])
    at, buffers = sizes[0], []
    for length in sizes[1:]:
        at += -at % _ALIGN
        buffers.append(view[at : at + length])
        at += length
    return pickle.loads(view[: sizes[0]], buffers=buffers)


Frames = list[tuple[bytes, int]]
"""Bytes to send, each with the descriptor that goes with them, or -1."""


def frames(*messages: Packed) -> Frames:
    """Return messages as what is sent, in order: to any number of ranks."""
    found: Frames = []
    waiting = b""  # small ones go together: every system call wakes the reader
    for packed in messages:
        header = _HEADER.pack(packed.size, packed.parts, packed.fd >= 0)
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
        self._bytes = bytearray()
        self._fds: deque[int] = deque()

    def fileno(self) -> int:
        """Return the socket's descriptor, for a selector; see also `has_more`."""
        return self._socket.fileno()

    def has_more(self) -> bool:
        """Return whether (the beginning of) a message was read already: no selector tells."""
        return bool(self._bytes)

    def send(self, *messages: Packed) -> None:
        """Send what is packed, in order."""
        self.send_frames(frames(*messages))

    def send_frames(self, ready: Frames) -> None:
        """Send what `frames` has made."""
        for data, fd in ready:
            if fd < 0:
                self._socket.sendall(data)
            else:
                socket.send_fds(self._socket, [data], [fd])

    def receive(self) -> Callable[[], Any]:
        """Take the next message out of the pipe; return a function that unpickles it.

        Raises:
            EOFError: the other end is gone.

        """
        have = self._bytes
        if len(have) < _HEAD:
            self._fill(_HEAD)
        size, parts, in_file = _HEADER.unpack_from(have)
        if in_file:
            del have[:_HEAD]
            fd = self._fds.popleft()
            try:
                mapped = mmap.mmap(fd, size, access=self._access)
            finally:
                os.close(fd)
            return partial(_unpack, mapped, size, parts)
        end = _HEAD + size
        if len(have) < end:
            self._fill(end)
        data = have[_HEAD:end]
        del have[:end]
        return partial(_unpack, data, size, parts)

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
        self._bytes += chunk

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
