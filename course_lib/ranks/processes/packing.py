"""Python objects as bytes, for another process of this machine: large ones in shared memory.

An object becomes a pickle and, beside it, the bytes of its tensors and arrays as they lie in
memory (pickle protocol 5, PEP 574). Small ones stay in line. Large ones are written once into a
nameless file in memory, which the reader maps, without a copy. A few bytes that need no pickling
go as they are: see `plain`.
"""

from __future__ import annotations

import builtins
import ctypes
import io
import os
import pickle
import struct
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import cloudpickle
import torch

from course_lib.ranks.board.memory import anonymous_file
from course_lib.ranks.processes.functions import Pickler

_INLINE = 1 << 13
"""Bytes that surely fit into the socket's buffer, so that sending them never waits."""
_ALIGN = 64
_BY_NAME = (cloudpickle.cloudpickle.__name__, Pickler.__module__, __name__)
"""Modules whose functions need no look-up whether they can be imported."""
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


class _Pickler(Pickler):
    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is FunctionType:
            # Two for every function of a cell. They go by name, as anything that is imported;
            # cloudpickle would look that up each time, for a third of an empty call's pickling.
            if obj.__module__ in _BY_NAME:
                return NotImplemented
            return super().reducer_override(obj)
        if kind is type and getattr(builtins, obj.__name__, None) is obj:  # in annotations
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


def unpack(data: Any, size: int, parts: int) -> Any:
    """Return what `data` is, the bytes of a `Packed` of this size with so many parts."""
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
