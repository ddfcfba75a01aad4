"""Payloads: the bytes of a compressed tensor on the wire.

    >>> from course_lib.compression import OneBit
    >>> payload = OneBit().encode(gradient)  # payload.nbytes are sent, not gradient.nbytes
    >>> result = OneBit().decode(payload)

Papers count bits, but a network sends a message of bytes. So a payload *is* one vector of bytes,
`wire`, and `nbytes` is its length. It contains all indices, scales and signs, so all of them count.
The length depends only on the number of elements, never on their values. So the receiver knows the
size in advance and does not have to wait for it.

Compressors calculate in float32 and return the dtype of the gradients.
"""

import copy
import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

Shape = int | Sequence[int]
"""A tensor's shape, or the length of a vector."""


@dataclass(frozen=True)
class Payload:
    """A compressed tensor.

    Attributes:
        wire: all bytes that are sent, shape (nbytes,), uint8.
        shape: the shape of the original tensor. The receiver knows it: gradients have the same
            shape on all ranks, in every step.
        dtype: the dtype of the original tensor, which the receiver also knows.
        agreed: data that sender and receiver derive equally without a message, such as a random
            draw from a shared seed; None for most compressors.

    """

    wire: Tensor
    shape: torch.Size
    dtype: torch.dtype
    agreed: Any = None

    @property
    def nbytes(self) -> int:
        """The number of bytes that are sent."""
        return self.wire.numel()


class Compressor(ABC):
    """Compresses a tensor, and restores one of the same size: C(x) = decode(encode(x)).

    Some compressors keep a memory between steps, separately for each stream of tensors. `key` names
    the stream to which a tensor belongs, such as a bucket of a model or a shard of it. Compressors
    without memory ignore it.
    """

    linear = False
    """Whether an all-reduce can sum payloads, so that `sum_over` exists."""
    memory: ClassVar[tuple[str, ...]] = ()
    """The attributes that are remembered between steps, by name."""

    @abstractmethod
    def nbytes(self, shape: Shape) -> int:
        """Return the length of the payload of a tensor of this shape."""

    @abstractmethod
    def encode(self, tensor: Tensor, key: Hashable = None) -> Payload:
        """Return the payload of `tensor`, of any shape and floating dtype, without changing it."""

    def decode(self, payload: Payload) -> Tensor:
        """Return a new tensor of the payload's shape and dtype."""
        result = torch.empty(payload.shape.numel(), device=payload.wire.device)
        self.decode_into(payload, result)
        return result.view(payload.shape).to(payload.dtype)

    @abstractmethod
    def decode_into(self, payload: Payload, out: Tensor, add: bool = False) -> None:
        """Write the decoded numbers to `out`, a floating-point vector, or add them to `out`.

        On a CPU, allocating new memory takes as long as filling it, so compressors avoid it if they
        can.
        """

    def encode_with_residual(self, x: Tensor, residual: Tensor, key: Hashable = None) -> Payload:
        """Return x + residual, compressed; `residual` becomes the part that is left out.

        Both are float32 vectors. This plain version passes over memory five times. Compressors that
        work block by block do all steps while a block is in the cache.
        """
        residual += x
        fill_unless(is_finite(residual), residual, math.nan)  # else it might not be sent at all
        payload = self.encode(residual, key)
        residual -= self.decode(payload)
        return payload

    def sum_over(
        self, tensor: Tensor, key: Hashable, all_reduce: Callable[[Tensor], object]
    ) -> tuple[Tensor, Tensor]:
        """Return C(Σ x) over all ranks, and this rank's part of it: float32, of `tensor`'s shape.

        Only for `linear` compressors, for which C(Σ x) = Σ C(x). `all_reduce` sums a tensor over
        the ranks, in place.
        """
        raise NotImplementedError(
            f"payloads of {type(self).__name__} cannot be summed: they are not linear"
        )

    def forget(self, key: Hashable) -> None:
        """Delete the memory of `key`, and of tuples that begin with it."""
        for name in self.memory:
            entries = getattr(self, name)
            for member in keys_of(entries, key):
                del entries[member]

    def drop_overflow(self, key: Hashable, total: Tensor) -> None:  # noqa: B027
        """Drop what is left of earlier tensors of `key` if `total` is not finite.

        `total` is the result of an all-reduce, equal on all ranks, so all of them drop or none.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what is remembered, for a checkpoint: a run resumed without it would differ.

        The random numbers of stochastic rounding are not part of it.
        """
        return {name: copy.deepcopy(getattr(self, name)) for name in self.memory}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace what is remembered by that from `state_dict`."""
        for name in self.memory:
            setattr(self, name, copy.deepcopy(state[name]))


class Codec(Compressor):
    """A compressor made of two functions.

    Args:
        encode: takes a float32 vector and returns its wire, whose length depends only on the
            length of the vector.
        decode: ``decode(wire, shape, dtype)`` returns the tensor.

    """

    def __init__(
        self,
        encode: Callable[[Tensor], Tensor],
        decode: Callable[[Tensor, Sequence[int], torch.dtype], Tensor],
    ) -> None:
        self._encode, self._decode = encode, decode

    def nbytes(self, shape: Shape) -> int:
        """Return the length of the wire of as many zeros."""
        return self._encode(torch.zeros(elements(shape))).numel()

    def encode(self, tensor: Tensor, key: Hashable = None) -> Payload:
        """Return the wire of the elements in order."""
        return Payload(self._encode(as_vector(tensor)), tensor.shape, tensor.dtype)

    def decode_into(self, payload: Payload, out: Tensor, add: bool = False) -> None:
        """As `Compressor.decode_into`: what the wire stands for."""
        write(out, self._decode(payload.wire, payload.shape, payload.dtype).view(-1), add)


def elements(shape: Shape) -> int:
    """Return how many elements a tensor of this shape has."""
    return shape if isinstance(shape, int) else prod(shape)


def as_vector(tensor: Tensor) -> Tensor:
    """Return the elements of `tensor` in order, as a float32 vector: a view if possible.

    Raises TypeError for complex, integer or sparse tensors, which cannot be compressed.
    """
    if tensor.is_sparse or not tensor.is_floating_point():
        kind = "sparse" if tensor.is_sparse else str(tensor.dtype)
        raise TypeError(f"only dense floating-point tensors can be compressed, not {kind}")
    return tensor.detach().reshape(-1).to(torch.float32)


def write(out: Tensor, values: Tensor, add: bool) -> None:
    """Write `values` to `out`, of the same shape, or add them to `out`."""
    if add:
        out.add_(values)
    else:
        out.copy_(values)


def section(wire: Tensor, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Return bytes `start` to `stop` of a wire as elements of `dtype`: a view if aligned.

    A payload that was received together with others may begin at any byte, but a view as four-byte
    numbers may not.
    """
    piece = wire[start:stop]
    if piece.storage_offset() % dtype.itemsize:
        piece = piece.clone()
    return piece.view(dtype)


def in_cache(x: Tensor, at_once: int = 1 << 17) -> Iterator[slice]:
    """Yield the pieces of a vector, to be processed one after the other.

    `at_once`: elements of a piece on a CPU, by default 512 KiB.

    Several passes over a piece that stays in the cache take as long as one pass over memory. On a
    GPU every pass is a kernel, so the whole vector is one piece there.
    """
    if x.device.type != "cpu":
        at_once = max(x.numel(), 1)
    for start in range(0, x.numel(), at_once):
        yield slice(start, min(start + at_once, x.numel()))


def kernels_for(x: Tensor) -> Any:
    """Return `triton_kernels` if `x` is on a GPU and Triton is installed, else None.

    Triton comes with PyTorch for CUDA. Without it the plain version does the same in more passes.
    """
    if x.is_cuda:
        with suppress(ImportError):
            return importlib.import_module("course_lib.compression.triton_kernels")
    return None


def is_finite(x: Tensor) -> Tensor:
    """Return whether no element is infinite or not-a-number: a bool, on the device of `x`.

    On a CPU this is twenty times as fast as to test each element.
    """
    if not x.numel():
        return torch.ones((), dtype=torch.bool, device=x.device)
    low, high = x.aminmax()
    return low.isfinite() & high.isfinite()


def fill_unless(keep: Tensor, x: Tensor, value: float) -> None:
    """Fill `x` with `value` unless `keep`, a bool; on a GPU nothing waits for it."""
    if keep.is_cuda or not keep:
        x.masked_fill_(~keep, value)


def keys_of(memory: dict[Hashable, Any], key: Hashable) -> list[Hashable]:
    """Return the keys of `memory` that are `key`, or tuples that begin with it."""
    return [k for k in memory if k == key or (isinstance(k, tuple) and k[:1] == (key,))]


def verify_density(density: float) -> None:
    """Raise ValueError unless `density` is a share that can be sent."""
    if not 0 < density <= 1:
        raise ValueError(
            f"density, the share that is sent, must be above 0 and up to 1, not {density}"
        )
