"""The loops of `Uniform8Bit` and `OneBit` on a GPU: one kernel each, written in Triton.

In plain PyTorch every operation reads all of its tensors from memory and writes its result back:
8 bits with error feedback are nine such passes. A kernel keeps a number in a register until it is
done with it. In two passes, it adds the residual, rounds, packs, and writes the new residual back.

The plain version is the oracle: both give the same bytes on the wire and the same residual, bit for
bit. So both must calculate in the same way. `div_rn` divides as PyTorch does, and no product and
sum are fused into one operation that rounds once (``enable_fp_fusion=False``). The host knows all
sizes, and all values stay on the device. So neither waits for the other.

Without a GPU the kernels run in Triton's interpreter, ``TRITON_INTERPRET=1``. Tests use it; it says
nothing about their speed.

P. Tillet, H. T. Kung and D. Cox, "Triton: An Intermediate Language and Compiler for Tiled Neural
Network Computations", MAPL 2019.
"""

import triton
import triton.language as tl
from torch import Tensor

TILE = 1024
"""Elements that a program has in its registers at once."""
TO_WHOLE = tl.constexpr(12582912.0)
"""1.5 · 2²³: so large that float32 has whole numbers only there; adding it rounds, half to even."""


def encode_bytes(
    x: Tensor, residual: Tensor | None, scales: Tensor, codes: Tensor, block: int, smallest: float
) -> None:
    """Write a scale per block and a code per element: see `block_scaled.Uniform8Bit`.

    Args:
        x: float32, shape (n,).
        residual: is added to x, and becomes what the codes leave out; None for none.
        scales: float32, shape (⌈n/block⌉,).
        codes: uint8, shape (n,).
        block: elements with one scale.
        smallest: scales below count as zero.

    """
    if len(x):
        remembered = x if residual is None else residual
        _encode_bytes[(len(scales),)](
            *(x, remembered, scales, codes, len(x)),
            BLOCK=block,
            SMALLEST=smallest,
            TILE=TILE,
            REMEMBER=residual is not None,
            enable_fp_fusion=False,
        )


def decode_bytes(scales: Tensor, codes: Tensor, out: Tensor, block: int, add: bool) -> None:
    """Write code times scale to `out`, a float32 vector, or add it to what is there."""
    if len(out):
        _decode_bytes[(triton.cdiv(len(out), TILE),)](
            *(scales, codes, out, len(out)), BLOCK=block, TILE=TILE, ADD=add, enable_fp_fusion=False
        )


def encode_bits(p: Tensor, scale: Tensor, packed: Tensor, remember: bool) -> None:
    """Write a bit per element of the float32 vector `p`, 1 below zero; see `one_bit.OneBit`.

    `scale`: float32, shape (1,); `packed`: uint8. If `remember`, `p` becomes what that leaves out.
    """
    if len(p):
        _encode_bits[(triton.cdiv(len(packed), TILE // 8),)](
            *(p, scale, packed, len(p)), TILE=TILE, REMEMBER=remember, enable_fp_fusion=False
        )


def decode_bits(scale: Tensor, packed: Tensor, out: Tensor, add: bool) -> None:
    """Write plus or minus the scale to `out`, a float32 vector, or add it to what is there."""
    if len(out):
        _decode_bits[(triton.cdiv(len(out), TILE),)](
            *(scale, packed, out, len(out)), TILE=TILE, ADD=add, enable_fp_fusion=False
        )


@triton.jit
def _encode_bytes(
    x,
    residual,
    scales,
    codes,
    n,
    BLOCK: tl.constexpr,
    SMALLEST: tl.constexpr,
    TILE: tl.constexpr,
    REMEMBER: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    largest = tl.zeros([TILE], tl.float32)
    not_numbers = tl.zeros([TILE], tl.int32)
    for start in range(0, BLOCK, TILE):
        within = start + tl.arange(0, TILE)
        here = (within < BLOCK) & (first + within < n)
        p = tl.load(x + first + within, mask=here, other=0.0)
        if REMEMBER:
            p += tl.load(residual + first + within, mask=here, other=0.0)
            tl.store(residual + first + within, p, mask=here)
        largest = tl.maximum(largest, tl.abs(p))
        not_numbers |= (p != p).to(tl.int32)
    most = tl.where(tl.max(not_numbers, 0) > 0, float("nan"), tl.max(largest, 0))
    scale = tl.div_rn(most, 127.0)
    tl.store(scales + tl.program_id(0), scale)
    inverse = tl.where(scale < SMALLEST, 0.0, tl.div_rn(1.0, scale))
    tl.debug_barrier()  # what other threads of this program have stored is read below
    for start in range(0, BLOCK, TILE):
        within = start + tl.arange(0, TILE)
        here = (within < BLOCK) & (first + within < n)
        if REMEMBER:
            p = tl.load(residual + first + within, mask=here, other=0.0)
        else:
            p = tl.load(x + first + within, mask=here, other=0.0)
        code = (p * inverse + TO_WHOLE) - TO_WHOLE
        if REMEMBER:
            tl.store(residual + first + within, p - code * scale, mask=here)
        code = tl.where(code == code, code, 0.0)
        tl.store(codes + first + within, code.to(tl.int8).to(tl.uint8, bitcast=True), mask=here)


@triton.jit
def _decode_bytes(
    scales, codes, out, n, BLOCK: tl.constexpr, TILE: tl.constexpr, ADD: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    here = place < n
    code = tl.load(codes + place, mask=here, other=0).to(tl.int8, bitcast=True)
    value = code.to(tl.float32) * tl.load(scales + place // BLOCK, mask=here, other=0.0)
    if ADD:
        value += tl.load(out + place, mask=here, other=0.0)
    tl.store(out + place, value, mask=here)


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
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    here = place < n
    byte = tl.load(packed + place // 8, mask=here, other=0).to(tl.int32)
    length = tl.load(scale)
    value = tl.where((byte >> (place % 8).to(tl.int32)) & 1 == 1, -length, length)
    if ADD:
        value += tl.load(out + place, mask=here, other=0.0)
    tl.store(out + place, value, mask=here)
