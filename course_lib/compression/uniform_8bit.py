"""Eight bits: every number is rounded to a byte, with one scale for each block of numbers.

    >>> from course_lib.compression import Uniform8Bit
    >>> nbytes = Uniform8Bit().encode(gradient).nbytes  # a quarter of float32, 4 bytes per block
    >>> unbiased = Uniform8Bit(stochastic=True)  # rounds up or down at random

    s = max|x| / 127 over a block          q_i = round(x_i / s), one byte          C(x)_i = s q_i

A byte is one of the 255 whole numbers from -127 to 127; neighbouring values are s apart. Rounding
to the nearest value has an error of at most s/2. This error has the same sign every time for the
same number, so it is biased. Stochastic rounding, ⌊x/s + u⌋ with u uniform in [0, 1), has an error
below s and is right on average:

    nearest       |C(x)_i - x_i| ≤ s/2
    stochastic    E C(x) = x,    E‖C(x) - x‖² ≤ n s²/4

The largest element of a block determines its scale. So smaller blocks fit better, but each costs 4
bytes. An element that is infinite or not a number makes its whole block not-a-number.

On a CPU the loop goes block by block and does all steps while the block is in the cache. This is
four times as fast as one step at a time for the whole vector. On a GPU all blocks are done at once.

BAGUA (S. Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", VLDB 2021)
exchanges 8 bits with a minimum and a maximum per chunk. Block scales: T. Dettmers et al., "8-bit
Optimizers via Block-wise Quantization", ICLR 2022.
"""

from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor

from course_lib.compression.payload import (
    Compressor,
    Payload,
    Shape,
    as_vector,
    elements,
    kernels_for,
    section,
    write,
)

BLOCK = 1 << 16
"""Elements with one scale: 256 KiB of float32, so that a block and its work space fit the cache."""
LARGEST = 127
"""The largest number that a byte stands for."""
SMALLEST = torch.finfo(torch.float32).tiny
"""Scales below this (1.2e-38) count as zero: the block is sent as zeros, and all of it is left."""


def quantize(x: Tensor, u: Tensor) -> Tensor:
    """Return the bytes of `x` with one scale for all of it: the formula, without blocks.

        s = max|x| / 127          q_i = ⌊x_i / s + u_i⌋

    Args:
        x: n numbers, of any shape and floating dtype.
        u: numbers in [0, 1), in the shape of `x`; 1/2 rounds to the nearest.

    Returns:
        n + 4 bytes, uint8: s as float32, then each q as int8. All are 0 if `x` is 0.

    """
    x, u = as_vector(x), u.reshape(-1)
    scale = x.abs().max() / LARGEST if x.numel() else x.new_zeros(())
    scaled = x / torch.where(scale == 0, 1, scale)
    # In float32, 127 + u can be 128, which int8 does not have.
    codes = (scaled + u).floor().clamp(max=LARGEST).to(torch.int8)
    return torch.cat([scale.view(1).view(torch.uint8), codes.view(torch.uint8)])


def dequantize(wire: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the numbers s q_i of the bytes of `quantize`, in this shape and dtype."""
    scale = wire[:4].clone().view(torch.float32)  # a view needs memory that begins at four bytes
    return (wire[4:].view(torch.int8) * scale).view(shape).to(dtype)


class Uniform8Bit(Compressor):
    """Whole numbers from -127 to 127, times a scale.

    Args:
        stochastic: round up or down at random, right on average, instead of to the nearest.
        block: how many elements share a scale.
        seed: the seed of the random numbers. Give every rank a different one: errors that are equal
            on all ranks do not average out. None uses PyTorch's generator.

    """

    def __init__(
        self, stochastic: bool = False, block: int = BLOCK, seed: int | None = None
    ) -> None:
        self.stochastic = stochastic
        self.block = block
        self.seed = seed
        self._generator: torch.Generator | None = None

    def nbytes(self, shape: Shape) -> int:
        """Return one byte per element and four per block; the last block may be shorter."""
        numel = elements(shape)
        return numel + 4 * -(-numel // self.block)

    def encode(self, tensor: Tensor, key: Hashable = None) -> Payload:
        """Return codes and scales."""
        return self._encode(as_vector(tensor), None, tensor)

    def encode_with_residual(self, x: Tensor, residual: Tensor, key: Hashable = None) -> Payload:
        """As `Compressor.encode_with_residual`, with all steps while a block is in the cache."""
        return self._encode(x, residual, x)

    def decode_into(self, payload: Payload, out: Tensor, add: bool = False) -> None:
        """As `Compressor.decode_into`, block by block: code times scale."""
        wire, numel = payload.wire, out.numel()
        # The codes come first: there the memory is aligned to 16 bytes, so a thread of a GPU can
        # load or store 16 codes at once.
        scales, codes = section(wire, numel, wire.numel(), torch.float32), wire[:numel]
        in_place = out.dtype == torch.float32 and not add
        fused = None if self.stochastic or out.dtype != torch.float32 else kernels_for(out)
        if fused is not None:
            fused.decode_bytes(scales, codes, out, self.block, add)
            return
        for at, first, rows in self._pieces(out):
            target = out[at].view(rows, -1)
            work = target if in_place else torch.empty_like(target, dtype=torch.float32)
            work.copy_(codes[at].view(torch.int8).view(rows, -1))
            work.mul_(scales[first : first + rows, None])
            if not in_place:
                write(target, work, add)

    def _encode(self, x: Tensor, residual: Tensor | None, like: Tensor) -> Payload:
        numel = x.numel()
        wire = torch.empty(self.nbytes(numel), dtype=torch.uint8, device=x.device)
        scales, codes = torch.empty(-(-numel // self.block), device=x.device), wire[:numel]
        fused = None if self.stochastic else kernels_for(x)
        if fused is not None:
            fused.encode_bytes(x.contiguous(), residual, scales, codes, self.block, SMALLEST)
        else:
            self._encode_in_pieces(x, residual, scales, codes)
        wire[numel:] = scales.view(torch.uint8)
        return Payload(wire, like.shape, like.dtype)

    def _encode_in_pieces(
        self, x: Tensor, residual: Tensor | None, scales: Tensor, codes: Tensor
    ) -> None:
        work_space = torch.empty_like(x[: self.block] if x.device.type == "cpu" else x)
        for at, first, rows in self._pieces(x):
            exact = x[at] if residual is None else residual[at].add_(x[at])
            exact = exact.view(rows, -1)
            scale = scales[first : first + rows, None]
            # aminmax over a whole tensor is 20 times as fast as over a dimension of one row.
            low, high = exact.aminmax() if rows == 1 else exact.aminmax(dim=1, keepdim=True)
            # Divide by a tensor: on a GPU, `div_` by a number multiplies by its rounded reciprocal.
            maximum = torch.maximum(-low, high).abs_()  # all zeros: 0, not -0
            scale.copy_(maximum.div_(torch.full_like(maximum, LARGEST)))
            # For a block of zeros or tiny numbers, 1 / s is infinite: use 0. (NaN stays NaN.)
            inverse = torch.where(scale < SMALLEST, 0, 1 / scale)
            work = torch.mul(exact, inverse, out=work_space[: exact.numel()].view_as(exact))
            self._round(work, codes[at].view(rows, -1))
            if residual is not None:
                exact.sub_(work.mul_(scale))

    def _round(self, scaled: Tensor, codes: Tensor) -> None:
        """Round `scaled` in place, and write its bytes to `codes`.

        Not-a-number becomes 0, but the block's scale is then NaN.
        """
        if self.stochastic:
            # In float32, 127 + u can be 128, hence the clamp.
            scaled.add_(self._noise(scaled)).floor_().clamp_(max=LARGEST)
        else:
            scaled.round_()
        codes.view(torch.int8).copy_(scaled)

    def _pieces(self, x: Tensor) -> Iterator[tuple[slice, int, int]]:
        """Yield pieces to process at once: elements, number of the first block, count of blocks."""
        numel = x.numel()
        blocks = numel // self.block
        at_once = 1 if x.device.type == "cpu" else max(blocks, 1)
        for first in range(0, blocks, at_once):
            yield slice(first * self.block, (first + at_once) * self.block), first, at_once
        if numel % self.block:
            yield slice(blocks * self.block, numel), blocks, 1

    def _noise(self, like: Tensor) -> Tensor:
        """Return uniform numbers in [0, 1), of the shape of `like`."""
        if self.seed is not None and self._generator is None:
            self._generator = torch.Generator(like.device).manual_seed(self.seed)
        return torch.rand(like.shape, device=like.device, generator=self._generator)
