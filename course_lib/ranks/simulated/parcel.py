"""What simulated ranks get and give back: copies, as if they had travelled between processes.

Functions and classes of a notebook are pickled by value, so every rank has its own. The memory of
tensors is not pickled: each rank gets a copy that PyTorch makes when one of them is written to, so
that a large argument costs its size once, and not once per rank.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import cloudpickle
import torch
from cloudpickle import cloudpickle as trackers
from torch.nn import Parameter


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


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]
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
                memory = copy_of(self._parcel.memory[values.memory]).untyped_storage()
                self._memory[values.memory] = memory
            tensor = torch.empty(0, dtype=values.dtype)
            tensor.set_(memory, values.offset, values.size, values.stride)
        else:
            tensor = copy_of(values)
        if is_parameter:
            return Parameter(tensor, requires_grad)
        return tensor.requires_grad_() if requires_grad else tensor


_LAZY_FROM = 1 << 16
"""Bytes: a smaller tensor is copied at once, which is as fast."""


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy: of a large tensor one that is made only when either is written to."""
    if tensor.nbytes >= _LAZY_FROM:
        try:
            return torch._lazy_clone(tensor)
        except (RuntimeError, AttributeError):
            pass  # memory that is not PyTorch's own, or a PyTorch without copies on write
    return tensor.clone()


def pack(obj: Any, known: frozenset[str] = frozenset()) -> Parcel:
    """Return an object, ready to be unpacked any number of times.

    Args:
        obj: anything that cloudpickle can pickle.
        known: names of the classes that the receiver has; they are not sent.

    """
    file = io.BytesIO()
    packer = _Packer(file, known)
    packer.dump(obj)
    return Parcel(file.getvalue(), *packer.sent(), packer.classes)


def pack_to_share(obj: Any) -> Parcel:
    """Return an object, packed, whose owner may go on to write to its tensors."""
    parcel = pack(obj)
    parcel.memory = [memory.clone() for memory in parcel.memory]
    parcel.tensors = [
        sent._replace(values=sent.values.clone()) if isinstance(sent.values, torch.Tensor) else sent
        for sent in parcel.tensors
    ]
    return parcel


def unpack(parcel: Parcel) -> Any:
    """Return a new copy of what was packed."""
    with torch.no_grad():
        return _Unpacker(parcel).load()
