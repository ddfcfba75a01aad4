"""Payloads: the bytes of a compressed tensor on the wire.

    >>> from course_lib.compression import OneBit
    >>> payload = OneBit().encode(gradient)  # payload.nbytes are sent, not gradient.nbytes
    >>> result = OneBit().decode(payload)

A paper counts bits; a network carries bytes, in one piece. So a payload *is* one vector of bytes,
`wire`, and `nbytes` is its length. Indices, scales and signs are all in it, so all of them count.
The length depends only on the number of elements, never on their values. So the receiver knows the
size in advance, and no rank waits for it.

Compressors calculate in float32 and return the dtype of the gradients.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

Shape = int | Sequence[int]
"""A tensor's shape, or the length of a vector."""


@dataclass(frozen=True)
class Payload:
    """A compressed tensor.

    Attributes:
        wire: all that is sent, shape (nbytes,), uint8.
        shape: of the tensor it stands for. The receiver knows it: gradients have the same shape on
            all ranks, in every step.
        dtype: likewise.
        agreed: what sender and receiver derive alike without a message, such as a random draw from
            a shared seed; None for most compressors.

    """

    wire: Tensor
    shape: torch.Size
    dtype: torch.dtype
    agreed: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes that are sent."""
        return self.wire.numel()


class Compressor(ABC):
    """Makes a tensor small, and a tensor of the old size again: C(x) = decode(encode(x)).

    `key` names the stream of tensors to which one belongs, such as a bucket of a model, or a shard
    of it: some compressors remember something between the steps, apart for each stream. Those
    that remember nothing ignore it.
    """

    linear = False
    """Whether payloads can be summed on the way, so that `sum_over` exists."""

    @abstractmethod
    def nbytes(self, shape: Shape) -> int:
        """Return the length of the payload of a tensor of this shape."""

    @abstractmethod
    def encode(self, tensor: Tensor, key: Hashable = None) -> Payload:
        """Return `tensor`, of any shape and floating dtype, compressed. It is left as it is."""

    @abstractmethod
    def decode(self, payload: Payload) -> Tensor:
        """Return a new tensor of the payload's shape and dtype."""

    def decode_into(self, payload: Payload, out: Tensor, add: bool = False) -> None:
        """Write what `decode` gives to `out`, a vector, or add it to what is there.

        New memory takes a CPU as long to get as to fill: compressors that can do without it do.
        """
        decoded = self.decode(payload).view(-1)
        if add:
            out += decoded
        else:
            out.copy_(decoded)

    def encode_with_residual(self, x: Tensor, residual: Tensor, key: Hashable = None) -> Payload:
        """Return x + residual, float32 vectors, compressed; `residual` becomes what that left out.

        This plain version passes over memory five times. Compressors that work block by block do
        all of it while a block is in the cache.
        """
        residual += x
        payload = self.encode(residual, key)
        residual -= self.decode(payload)
        return payload

    def sum_over(
        self, tensor: Tensor, key: Hashable, all_reduce: Callable[[Tensor], object]
    ) -> tuple[Tensor, Tensor]:
        """Return C(Σ x) over all ranks, and this rank's part in it: float32, of `tensor`'s shape.

        Only if `linear`: then C(Σ x) = Σ C(x). `all_reduce` sums a tensor over the ranks, in place.
        """
        raise NotImplementedError(
            f"payloads of {type(self).__name__} cannot be summed: they are not linear"
        )

    def forget(self, key: Hashable) -> None:  # noqa: B027  # most remember nothing
        """Drop what is remembered for `key`, and for tuples that begin with it."""


class CompressorInPlace(Compressor):
    """A compressor that decodes into memory that is there, and asks for new memory to `decode`."""

    def decode(self, payload: Payload) -> Tensor:
        """As `Compressor.decode`, by `decode_into`."""
        result = torch.empty(payload.shape.numel(), device=payload.wire.device)
        self.decode_into(payload, result)
        return result.view(payload.shape).to(payload.dtype)

    @abstractmethod
    def decode_into(self, payload: Payload, out: Tensor, add: bool = False) -> None:
        """As `Compressor.decode_into`, without `decode`."""


def elements(shape: Shape) -> int:
    """Return how many elements a tensor of this shape has."""
    return shape if isinstance(shape, int) else prod(shape)


def as_vector(tensor: Tensor) -> Tensor:
    """Return the elements of `tensor` in order, as a float32 vector: a view where that is possible.

    Raises TypeError for complex, integer or sparse tensors, which are no gradients we can compress.
    """
    if tensor.is_sparse or not tensor.is_floating_point():
        kind = "sparse" if tensor.is_sparse else str(tensor.dtype)
        raise TypeError(f"only dense floating-point tensors can be compressed, not {kind}")
    return tensor.detach().reshape(-1).to(torch.float32)


def section(wire: Tensor, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Return bytes `start` to `stop` of a wire as elements of `dtype`: a view where aligned.

    A payload that was received among others may begin at any byte; memory of four-byte numbers
    cannot.
    """
    piece = wire[start:stop]
    if piece.storage_offset() % dtype.itemsize:
        piece = piece.clone()
    return piece.view(dtype)


def in_cache(x: Tensor, at_once: int = 1 << 17) -> Iterator[slice]:
    """Yield the pieces of a vector to be worked on one after the other.

    `at_once`: elements of a piece on a CPU, by default 512 KiB.

    Several passes over a piece that stays in the cache take as long as one over memory. On a GPU
    every pass is a kernel, so there the vector is one piece.
    """
    if x.device.type != "cpu":
        at_once = max(x.numel(), 1)
    for start in range(0, x.numel(), at_once):
        yield slice(start, min(start + at_once, x.numel()))


def kernels_for(x: Tensor) -> Any:
    """Return `triton_kernels` if `x` is on a GPU for which there is Triton, else None.

    It comes with PyTorch for CUDA. Without it the plain version does the same, in more passes.
    """
    if x.is_cuda:
        with suppress(ImportError):
            return importlib.import_module("course_lib.compression.triton_kernels")
    return None


def forget(memory: dict[Hashable, Any], key: Hashable) -> None:
    """Remove from `memory` what belongs to `key`, or to a tuple that begins with it."""
    for each in list(memory):
        if each == key or (isinstance(each, tuple) and each[:1] == (key,)):
            del memory[each]
