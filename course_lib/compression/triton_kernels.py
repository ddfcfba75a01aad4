"""The loops of `Uniform8Bit` and `OneBit` on a GPU: one kernel each, or two, written in Triton.

In plain PyTorch every operation reads all of its tensors from memory and writes its result back:
8 bits with error feedback are nine such passes. A kernel keeps a number in a register until all
steps are done: it adds the residual, rounds, packs, and writes the rest back to the residual.

A GPU is busy only with several programs on each of its processors, of which an H100 has 132. So a
program processes at most `TILE` elements, and 25 MiB are 3200 programs. A block of `Uniform8Bit`
may be longer than that. Then its scale depends on several programs, and a first kernel finds the
largest element of each part. With error feedback this kernel moves 12 bytes per element and the
next one 9. A block of `TILE` elements or fewer, as in `Uniform8Bit(block=TILE)`, needs one kernel,
which moves 13.

The plain version is the reference: both give the same bytes on the wire and the same residual, bit
for bit. So both must calculate in the same way. `div_rn` divides as PyTorch does, and no product
and sum are fused into one operation that rounds once (``enable_fp_fusion=False``). The host knows
all sizes, and all values stay on the device. So neither waits for the other.

Without a GPU the kernels run in Triton's interpreter, ``TRITON_INTERPRET=1``, which tests their
results. ``make gpu`` compares them with plain PyTorch on a GPU, bit for bit, and measures their
speed.

P. Tillet, H. T. Kung and D. Cox, "Triton: An Intermediate Language and Compiler for Tiled Neural
Network Computations", MAPL 2019.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048
"""The most elements of one program: 16 for each of its 128 threads, in registers."""
TO_WHOLE = tl.constexpr(12582912.0)
"""1.5 · 2²³: float32 has only whole numbers of this size, so adding it rounds, half to even."""


def encode_bytes(
    x: Tensor, residual: Tensor | None, scales: Tensor, codes: Tensor, block: int, smallest: float
) -> None:
    """Write a scale per block and a code per element: see `Uniform8Bit`.

    Args:
        x: float32, shape (n,).
        residual: is added to x, and becomes the part that the codes leave out; None for none.
        scales: float32, shape (⌈n/block⌉,).
        codes: uint8, shape (n,).
        block: how many elements share a scale.
        smallest: scales below this count as zero.

    """
    if not len(x):
        return
    cut = cut_blocks(len(x), block)
    programs = len(scales) * cut["PARTS"]
    remember = residual is not None
    exact = x if residual is None else residual
    largest = x.new_empty(programs)
    if cut["PARTS"] > 1:
        _launch(_find_largest, programs, x, exact, largest, len(x), **cut, REMEMBER=remember)
    arguments = (x, exact, largest, scales, codes, len(x))
    _launch(_encode_bytes, programs, *arguments, **cut, SMALLEST=smallest, REMEMBER=remember)


def decode_bytes(scales: Tensor, codes: Tensor, out: Tensor, block: int, add: bool) -> None:
    """Write code times scale to `out`, a float32 vector, or add it to `out`."""
    if len(out):
        cut = cut_blocks(len(out), block)
        programs = len(scales) * cut["PARTS"]
        _launch(_decode_bytes, programs, scales, codes, out, len(out), **cut, ADD=add)


def encode_bits(p: Tensor, scale: Tensor, packed: Tensor, remember: bool) -> None:
    """Write a bit per element of the float32 vector `p`, 1 if negative; see `one_bit.OneBit`.

    `scale`: float32, shape (1,); `packed`: uint8. If `remember`, `p` becomes the part left out.
    """
    if len(p):
        programs = triton.cdiv(len(p), TILE)
        _launch(_encode_bits, programs, p, scale, packed, len(p), TILE=TILE, REMEMBER=remember)


def decode_bits(scale: Tensor, packed: Tensor, out: Tensor, add: bool) -> None:
    """Write plus or minus the scale to `out`, a float32 vector, or add it to `out`."""
    if len(out):
        programs = triton.cdiv(len(out), TILE)
        _launch(_decode_bits, programs, scale, packed, out, len(out), TILE=TILE, ADD=add)


def cut_blocks(n: int, block: int) -> dict[str, int]:
    """Return how the blocks of n elements are divided: PARTS programs of TILE elements per BLOCK.

    Triton needs powers of two, so the last parts of a block may be short or empty. A block is not
    longer than necessary for n, because the kernels are compiled again for every different value.
    """
    block = min(block, triton.next_power_of_2(n))
    tile = min(TILE, triton.next_power_of_2(block))
    return {"BLOCK": block, "PARTS": triton.next_power_of_2(triton.cdiv(block, tile)), "TILE": tile}


def _launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Start `kernel` on the device of its first argument, which may not be the current one."""
    with torch.cuda.device_of(arguments[0]):
        kernel[(programs,)](*arguments, **constants, enable_fp_fusion=False)


@triton.jit
def _mine(n, BLOCK: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr):
    """Return the positions of this program's elements, and which of them exist."""
    within = tl.program_id(0) % PARTS * TILE + tl.arange(0, TILE)
    place = (tl.program_id(0) // PARTS).to(tl.int64) * BLOCK + within
    exists = place < n
    if BLOCK % TILE or BLOCK // TILE < PARTS:
        exists &= within < BLOCK
    return place, exists


@triton.jit
def _largest_of(p):
    """Return max|p|, or not-a-number if there is one."""
    is_number = tl.min((p == p).to(tl.int32), 0)
    return tl.where(is_number > 0, tl.max(tl.abs(p), 0), float("nan"))


@triton.jit
def _find_largest(
    x,
    residual,
    largest,
    n,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    REMEMBER: tl.constexpr,
):
    place, exists = _mine(n, BLOCK, PARTS, TILE)
    p = tl.load(x + place, mask=exists, other=0.0)
    if REMEMBER:
        p += tl.load(residual + place, mask=exists, other=0.0)
        tl.store(residual + place, p, mask=exists)
    tl.store(largest + tl.program_id(0), _largest_of(p))


@triton.jit
def _encode_bytes(
    x,
    residual,
    largest,
    scales,
    codes,
    n,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    SMALLEST: tl.constexpr,
    REMEMBER: tl.constexpr,
):
    block = tl.program_id(0) // PARTS
    place, exists = _mine(n, BLOCK, PARTS, TILE)
    if PARTS > 1:  # `_find_largest` ran before, and has added x to the residual
        p = tl.load(residual + place, mask=exists, other=0.0)
        maximum = _largest_of(tl.load(largest + block * PARTS + tl.arange(0, PARTS)))
    else:
        p = tl.load(x + place, mask=exists, other=0.0)
        if REMEMBER:
            p += tl.load(residual + place, mask=exists, other=0.0)
        maximum = _largest_of(p)
    scale = tl.div_rn(maximum, 127.0)
    if tl.program_id(0) % PARTS == 0:
        tl.store(scales + block, scale)
    inverse = tl.where(scale < SMALLEST, 0.0, tl.div_rn(1.0, scale))
    code = (p * inverse + TO_WHOLE) - TO_WHOLE
    if REMEMBER:
        tl.store(residual + place, p - code * scale, mask=exists)
    code = tl.where(code == code, code, 0.0)
    tl.store(codes + place, code.to(tl.int8).to(tl.uint8, bitcast=True), mask=exists)


@triton.jit
def _decode_bytes(
    scales,
    codes,
    out,
    n,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    ADD: tl.constexpr,
):
    place, exists = _mine(n, BLOCK, PARTS, TILE)
    code = tl.load(codes + place, mask=exists, other=0).to(tl.int8, bitcast=True)
    value = code.to(tl.float32) * tl.load(scales + tl.program_id(0) // PARTS)
    if ADD:
        value += tl.load(out + place, mask=exists, other=0.0)
    tl.store(out + place, value, mask=exists)


@triton.jit
def _encode_bits(p, scale, packed, n, TILE: tl.constexpr, REMEMBER: tl.constexpr):
    byte = tl.program_id(0).to(tl.int64) * (TILE // 8) + tl.arange(0, TILE // 8)
    bit = tl.arange(0, 8)
    place = byte[:, None] * 8 + bit[None, :]
    value = tl.load(p + place, mask=place < n, other=0.0)
    below = (value.to(tl.int32, bitcast=True) >> 31) & 1
    tl.store(packed + byte, tl.sum(below << bit[None, :], 1).to(tl.uint8), mask=byte * 8 < n)
    if REMEMBER:
        length = tl.load(scale)
        sent = tl.where(below == 1, -length, length)
        tl.store(p + place, value - sent, mask=place < n)


@triton.jit
def _decode_bits(scale, packed, out, n, TILE: tl.constexpr, ADD: tl.constexpr):
    byte = tl.program_id(0).to(tl.int64) * (TILE // 8) + tl.arange(0, TILE // 8)
    bit = tl.arange(0, 8)
    place = byte[:, None] * 8 + bit[None, :]
    eight = tl.load(packed + byte, mask=byte * 8 < n, other=0).to(tl.int32)
    length = tl.load(scale)
    value = tl.where((eight[:, None] >> bit[None, :]) & 1 == 1, -length, length)
    if ADD:
        value += tl.load(out + place, mask=place < n, other=0.0)
    tl.store(out + place, value, mask=place < n)
