"""What simulated ranks get and give back: copies, as if they had travelled between processes.

Functions and classes of a notebook are pickled by value, so every rank has its own. The memory of
tensors is not pickled. A large argument is copied once, for all ranks, and then by the operating
system, page by page, when a rank writes to it. A large result is handed over as it is, unless the
rank has kept it.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import pickle
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from cloudpickle import cloudpickle as trackers
from torch.nn import Parameter

from course_lib.ranks._torch.tensors import has_memory_alone
from course_lib.ranks.explain.pickling import Pickler
from course_lib.ranks.memory import anonymous_file


class _View(NamedTuple):
    """A tensor that shares its memory with another one of the parcel."""

    memory: int
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class _Sent(NamedTuple):
    """A tensor: its own values, or a view of memory."""

    values: torch.Tensor | _View
    is_parameter: bool
    requires_grad: bool


@dataclass
class Parcel:
    """An object on its way to a rank, or back."""

    data: bytes
    """The pickle, in which tensors and known classes are numbers."""
    tensors: list[_Sent]
    memory: list[torch.Tensor]
    """What several of the tensors share, as bytes."""
    classes: list[str]
    """Those that the receiver has already, by the name that cloudpickle gives them."""
    make: Callable[[], Callable[[torch.Tensor], torch.Tensor]]
    """Called once for each unpacking; returns what gives the receiver's own for a tensor."""


class _Packer(Pickler):
    def __init__(self, file: io.BytesIO, known: frozenset[str]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._known = known
        self._numbers: dict[int, int] = {}
        self.tensors: list[torch.Tensor] = []
        self.classes: list[str] = []

    def persistent_id(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is torch.Tensor or kind is Parameter:
            number = self._numbers.get(id(obj))
            if number is None and _is_plain(obj):
                number = self._numbers[id(obj)] = len(self.tensors)
                self.tensors.append(obj)
            return number
        if self._known and isinstance(obj, type):
            name = trackers._DYNAMIC_CLASS_TRACKER_BY_CLASS.get(obj)
            if name in self._known:
                self.classes.append(name)
                return -len(self.classes)
        return None

    def sent(self) -> tuple[list[_Sent], list[torch.Tensor]]:
        """Return the tensors, and the memory that several of them share."""
        memories = [tensor.untyped_storage()._cdata for tensor in self.tensors]
        uses = Counter(memories)
        places: dict[int, int] = {}
        shared: list[torch.Tensor] = []
        sent = []
        for tensor, memory in zip(self.tensors, memories, strict=True):
            values: torch.Tensor | _View = tensor.detach()
            if uses[memory] > 1:
                if memory not in places:
                    places[memory] = len(shared)
                    whole = torch.empty(0, dtype=torch.uint8)
                    shared.append(whole.set_(tensor.untyped_storage()))
                values = _View(
                    places[memory],
                    tensor.dtype,
                    int(tensor.storage_offset()),
                    tensor.shape,
                    tensor.stride(),
                )
            sent.append(_Sent(values, type(tensor) is Parameter, tensor.requires_grad))
        return sent, shared


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and not tensor.__dict__
        and not tensor._backward_hooks
    )


class _Unpacker(pickle.Unpickler):
    def __init__(self, parcel: Parcel) -> None:
        super().__init__(io.BytesIO(parcel.data))
        self._parcel = parcel
        self._memory: dict[int, torch.UntypedStorage] = {}
        self._made: dict[int, torch.Tensor] = {}
        self._own = parcel.make()

    def persistent_load(self, number: int) -> Any:
        if number < 0:
            name = self._parcel.classes[-number - 1]
            return trackers._DYNAMIC_CLASS_TRACKER_BY_ID[name]
        tensor = self._made.get(number)
        if tensor is None:
            tensor = self._made[number] = self._make(*self._parcel.tensors[number])
        return tensor

    def _make(
        self, values: torch.Tensor | _View, is_parameter: bool, requires_grad: bool
    ) -> torch.Tensor:
        if isinstance(values, _View):
            memory = self._memory.get(values.memory)
            if memory is None:
                memory = self._own(self._parcel.memory[values.memory]).untyped_storage()
                self._memory[values.memory] = memory
            tensor = torch.empty(0, dtype=values.dtype)
            tensor.set_(memory, values.offset, values.size, values.stride)
        else:
            tensor = self._own(values)
        if is_parameter:
            return Parameter(tensor, requires_grad)
        return tensor.requires_grad_() if requires_grad else tensor


def pack(obj: Any, known: frozenset[str] = frozenset()) -> Parcel:
    """Return an object that its owner does not write to any more; unpack it once.

    Args:
        obj: anything that cloudpickle can pickle.
        known: names of the classes that the receiver has; they are not sent.

    """
    file = io.BytesIO()
    packer = _Packer(file, known)
    packer.dump(obj)
    return Parcel(file.getvalue(), *packer.sent(), packer.classes, _take)


def pack_to_share(obj: Any) -> Parcel:
    """Return an object that its owner may write to; unpack it any number of times."""
    parcel = pack(obj)
    copies = Copies([*parcel.memory, *_values(parcel)])
    parcel.memory = [copies.put(memory) for memory in parcel.memory]
    parcel.tensors = [
        sent._replace(values=copies.put(sent.values)) if torch.is_tensor(sent.values) else sent
        for sent in parcel.tensors
    ]
    parcel.make = copies.reader
    return parcel


def unpack(parcel: Parcel) -> Any:
    """Return what was packed."""
    with torch.no_grad():
        return _Unpacker(parcel).load()


def _values(parcel: Parcel) -> list[torch.Tensor]:
    return [sent.values for sent in parcel.tensors if isinstance(sent.values, torch.Tensor)]


def _take() -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what gives a tensor itself if nobody else has its memory, else a copy."""

    def give(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if has_memory_alone(tensor) else tensor.clone()

    return give


class Copies:
    """Copies of large tensors in one file, which every rank maps: a page is its own once written.

    Args:
        tensors: what may be put there.

    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        size = sum(_room(tensor) for tensor in tensors)
        self._places: dict[int, int] = {}
        """Tensor → where it is in the file. They live as long as the parcel."""
        self._end = 0
        self._file: Any = None
        if size:
            self._file = anonymous_file("arguments")
            weakref.finalize(self, os.close, self._file)
            os.ftruncate(self._file, size)
            self._shared = mmap.mmap(self._file, size)

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy, in the file if it is large."""
        room = _room(tensor)
        if not room:
            return tensor.clone()
        copy = _read(self._shared, tensor.dtype, self._end, tensor.shape)
        copy.copy_(tensor)
        self._places[id(copy)] = self._end
        self._end += room
        return copy

    def reader(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return what gives one rank its copies of what was put."""
        mapped: Any = None
        if self._file is not None:
            # No descriptor left, perhaps, of a thousand ranks: then a copy at once.
            with contextlib.suppress(OSError):
                mapped = mmap.mmap(self._file, self._end, flags=mmap.MAP_PRIVATE)

        def give(tensor: torch.Tensor) -> torch.Tensor:
            place = self._places.get(id(tensor))
            if place is None or mapped is None:
                return tensor.clone()
            return _read(mapped, tensor.dtype, place, tensor.shape)

        return give


_LARGE = 1 << 20
"""Bytes from which on a tensor is mapped and not copied."""


def _room(tensor: torch.Tensor) -> int:
    """Return the bytes of whole pages that a tensor needs in the file; 0: it is not put there."""
    if tensor.nbytes < _LARGE or not tensor.is_contiguous():
        return 0
    return -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _read(buffer: Any, dtype: torch.dtype, place: int, size: torch.Size) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=dtype, count=size.numel(), offset=place).reshape(size)
