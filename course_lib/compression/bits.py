"""Bits: pack several small whole numbers into a byte.

    >>> from course_lib.compression.bits import pack_bits, unpack_bits
    >>> packed = pack_bits(torch.tensor([1, 0, 3, 2, 1]), width=2)  # four in a byte
    >>> packed.tolist(), unpack_bits(packed, width=2, length=5).tolist()
    ([177, 1], [1, 0, 3, 2, 1])

The smallest element of a tensor is a byte. A sign needs only one bit, and a number up to three
needs two. Element i of the codes is in byte i // m, m = 8 / width, at bit width · (i mod m), lowest
bits first. The last byte is padded with zeros.
"""

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode


def packed_bytes(length: int, width: int) -> int:
    """Return how many bytes `length` codes of `width` bits take."""
    return -(-length * width // 8)


def for_numpy(tensor: Tensor) -> bool:
    """Return whether NumPy may be used: on a CPU, if nothing counts or records operators."""
    return tensor.device.type == "cpu" and _get_current_dispatch_mode() is None


def pack_bits(codes: Tensor, width: int) -> Tensor:
    """Return `codes`, shape (length,), bool or uint8 below 2**width, as packed bytes, uint8."""
    if width == 8:
        return codes.to(torch.uint8)
    if width == 1 and for_numpy(codes):  # one instruction for 8 numbers, and 10 x faster
        return torch.from_numpy(np.packbits(codes.numpy(), bitorder="little"))
    per_byte = 8 // width
    padding = -codes.numel() % per_byte
    rows = torch.nn.functional.pad(codes.to(torch.uint8), (0, padding)).view(-1, per_byte)
    packed = torch.zeros_like(rows[:, 0])
    for place in range(per_byte):
        packed |= rows[:, place] << (place * width)
    return packed


def unpack_bits(packed: Tensor, width: int, length: int) -> Tensor:
    """Return the first `length` codes in `packed`, uint8, shape (length,)."""
    if width == 8:
        return packed[:length]
    if width == 1 and for_numpy(packed):
        bits = np.unpackbits(packed.numpy(), bitorder="little", count=length)
        return torch.from_numpy(bits)
    places = torch.arange(0, 8, width, device=packed.device, dtype=torch.uint8)
    codes = (packed[:, None] >> places) & ((1 << width) - 1)
    return codes.reshape(-1)[:length]


def table_by_byte(either: Tensor) -> Tensor:
    """Return `either[bit]` for the bits of every byte, shape (256, 8); `either` has shape (2,)."""
    every = torch.arange(256, dtype=torch.uint8, device=either.device)
    return either[unpack_bits(every, 1, 8 * 256).view(256, 8).long()]


def choose_by_bits(packed: Tensor, table: Tensor, out: Tensor) -> None:
    """Write `either[bit]` to each element of `out`, for the bits in `packed`.

    `table`: `table_by_byte(either)`, float32; `out`: a float32 vector. One look-up of 32 bytes
    writes eight numbers.
    """
    full_bytes = out.numel() // 8 if for_numpy(packed) else 0
    if full_bytes:
        eights = out[: 8 * full_bytes].numpy().view("V32")
        index = packed[:full_bytes].numpy().astype(np.intp)  # else `take` converts it, more slowly
        np.take(table.numpy().view("V32").ravel(), index, out=eights, mode="clip")
    if (tail := out[8 * full_bytes :]).numel():
        tail.copy_(table[packed[full_bytes:].long()].view(-1)[: tail.numel()])
