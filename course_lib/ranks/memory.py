"""Objects as bytes, and memory that processes share without a name.

An object becomes a pickle, made by cloudpickle, followed by the raw bytes of its tensors and arrays
as they are in memory (pickle protocol 5, PEP 574). A large object is written only once, into a
nameless file in memory, for any number of readers. Each reader maps the file: the system copies a
page when a reader writes to it. Nothing ever stays in the file system.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import struct
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from cloudpickle import cloudpickle as trackers

from course_lib.ranks.explain.pickling import Pickler

_INLINE = 1 << 13
"""Number of bytes that always fit into a socket's buffer, so that sending them never waits."""
_ALIGN = 64


def anonymous_file(name: str) -> int:
    """Return the descriptor of an empty file without a name.

    The file disappears with its last descriptor and mapping.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:  # macOS
        return os.dup(file.fileno())


def path_of(fd: int) -> str | None:
    """Return a path at which this process can open the file of `fd` again; ``None`` without one."""
    path = f"/proc/self/fd/{fd}"  # opens the file itself, even if it has no name
    return path if os.path.exists(path) else None


def map_file(fd: int, size: int, *, private: bool) -> Any:
    """Return a file's bytes. If `private`, other readers do not see what is written to them."""
    access = mmap.ACCESS_COPY if private else mmap.ACCESS_WRITE
    return mmap.mmap(fd, size, access=access)


@dataclass(slots=True, weakref_slot=True)
class Packed:
    """An object as bytes: inline, or in a file in memory that is closed with `close`."""

    size: int
    parts: int
    """Number of parts: the pickle and its buffers."""
    inline: bytes | bytearray | memoryview = b""
    fd: int = -1

    _free: Callable[[], Any] | None = None

    @classmethod
    def in_file(
        cls, size: int, parts: int, pieces: Iterable[bytes | bytearray | memoryview]
    ) -> Packed:
        """Return the object whose bytes are `pieces`, in a file."""
        fd = anonymous_file("call")
        packed = cls(size, parts, b"", fd)
        packed._free = weakref.finalize(packed, os.close, fd)
        with open(fd, "wb", closefd=False) as file:
            file.writelines(pieces)
        return packed

    def __reduce__(self) -> Any:
        """Allow an object that is inline to be a part of another one, without a copy."""
        assert self.fd < 0
        return Packed, (self.size, self.parts, pickle.PickleBuffer(self.inline))

    def moved_to_file(self) -> Packed:
        """Return this inline object in a file, so that each `read` maps it and copies no bytes."""
        return Packed.in_file(self.size, self.parts, [self.inline])

    def close(self) -> None:
        """Free the file, if there is one. It is also freed with the object."""
        if self._free is not None:
            self._free()

    def read(self, own_values: Sequence[Any] = ()) -> Any:
        """Return the object, with memory of its own. Each `read` returns a new object.

        `own_values` holds the parts that are elsewhere; see `pack`.
        """
        if self.fd < 0:
            return unpack(bytearray(self.inline), self.size, self.parts, own_values)
        try:
            data = map_file(self.fd, self.size, private=True)
        except OSError:  # perhaps a thousand ranks have used up all descriptors: copy at once
            data = bytearray(os.pread(self.fd, self.size, 0))
        return unpack(data, self.size, self.parts, own_values)

    def read_last(self) -> Any:
        """Return the object without a copy. After this call, it must not be read again."""
        data = map_file(self.fd, self.size, private=False) if self.fd >= 0 else self.inline
        return unpack(data, self.size, self.parts)


class _Packer(Pickler):
    known_classes: Collection[str] = ()
    elsewhere: Callable[[Any], int | None] | None = None

    def persistent_id(self, obj: Any) -> int | None:
        return None if self.elsewhere is None else self.elsewhere(obj)

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and _is_plain(obj):
            # A transposed or `channels_last` tensor keeps its memory order. Gaps are left out.
            order = sorted(range(obj.dim()), key=obj.stride, reverse=True)
            data = obj.detach().to("cpu").permute(order).contiguous()
            # A contiguous tensor of one element may have any stride.
            array: Any = data.as_strided((data.numel(),), (1,)).view(torch.uint8).numpy()
            shape = tuple(data.shape)
            buffer = pickle.PickleBuffer(array)
            return _tensor, (buffer, data.dtype, shape, order, obj.requires_grad)
        # An empty tensor too, or its reader would need CUDA.
        if type(obj) is torch.Tensor and obj.is_cuda:
            return _itself, (obj.to("cpu"),)
        if self.known_classes and isinstance(obj, type):
            name = trackers._DYNAMIC_CLASS_TRACKER_BY_CLASS.get(obj)
            if name in self.known_classes:
                return _known_class, (name,)
        return super().reducer_override(obj)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _known_class(name: str) -> type:
    notebook_class: type = trackers._DYNAMIC_CLASS_TRACKER_BY_ID[name]
    return notebook_class


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and not tensor.__dict__
        and tensor.numel() > 0
    )


def _tensor(
    buffer: Any, dtype: torch.dtype, shape: tuple[int, ...], order: list[int], requires_grad: bool
) -> torch.Tensor:
    data = torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(shape)
    back = sorted(range(len(order)), key=order.__getitem__)
    return data.permute(back).requires_grad_(requires_grad)


def pack(
    value: Any,
    *,
    inline: int = _INLINE,
    known_classes: Collection[str] = (),
    elsewhere: Callable[[Any], int | None] | None = None,
) -> Packed:
    """Return `value` as bytes. Tensors arrive on the CPU, without the graph that made them.

    Args:
        value: anything that cloudpickle can pickle.
        inline: up to this number of bytes, no file is used.
        known_classes: the notebook's classes that the reader already has, by the names that
            cloudpickle gives them. They are not sent.
        elsewhere: called with every part of the value; if it returns a number, the part is left
            out, and the reader takes it from its list of such parts, at this index.

    Raises any exception that pickling raises.

    """
    buffers: list[pickle.PickleBuffer] = []
    pickled = io.BytesIO()
    packer = _Packer(pickled, protocol=5, buffer_callback=buffers.append)
    packer.known_classes = known_classes
    packer.elsewhere = elsewhere
    packer.dump(value)
    views = [pickled.getbuffer(), *(buffer.raw() for buffer in buffers)]
    pieces: list[memoryview | bytes] = []
    for view in views:
        pieces += [view, bytes(-view.nbytes % _ALIGN)]
    pieces[-1] = struct.pack(f"<{len(views)}Q", *map(len, views)) if buffers else b""
    size = sum(map(len, pieces))
    if size <= inline:
        return Packed(size, len(views), bytearray().join(pieces))
    return Packed.in_file(size, len(views), pieces)


class _Unpacker(pickle.Unpickler):
    own_values: Sequence[Any] = ()

    def persistent_load(self, index: int) -> Any:
        return self.own_values[index]


def unpack(data: Any, size: int, parts: int, own_values: Sequence[Any] = ()) -> Any:
    """Return the object in `data`, which holds the bytes of a `Packed` of this size and parts.

    `own_values` holds the parts that are elsewhere; see `pack`.
    """
    view = memoryview(data)[:size]
    sizes = struct.unpack(f"<{parts}Q", view[size - 8 * parts :]) if parts > 1 else (size,)
    at, buffers = sizes[0], []
    for length in sizes[1:]:
        at += -at % _ALIGN
        buffers.append(view[at : at + length])
        at += length
    unpacker = _Unpacker(io.BytesIO(view[: sizes[0]]), buffers=buffers)
    unpacker.own_values = own_values
    return unpacker.load()
