"""What checks pass to a student's function: compressions for task 4, and codecs for task 5.

Every result is exact. All scales are 257 times a power of two. With multiples of a power of two,
float32 rounds nothing except what a codec rounds, and a sum of decoded tensors is the same in every
order. But bfloat16 rounds the scale itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

# Compressions -------------------------------------------------------------------------------------


def only_largest(p: Tensor) -> Tensor:
    """Return p with zeros for all numbers except one of the largest."""
    place = p.abs().argmax()
    return torch.zeros_like(p).flatten().index_fill(0, place, 1).view(p.shape) * p


def signs(p: Tensor) -> Tensor:
    """Return one power of two with the signs of p."""
    return torch.copysign(torch.exp2(torch.frexp(p.abs().max()).exponent - 1.0), p)


def rounded(p: Tensor) -> Tensor:
    """Return p in multiples of 1/256, with more bits than bfloat16 has; leave vectors unchanged.

    PowerSGD leaves vectors unchanged, too. The multiples are one too large. Otherwise all numbers
    except small ones would equal x, which bfloat16 can represent.
    """
    return (torch.round(p * 256) + 1) / 256 if p.dim() > 1 else p.clone()


COMPRESS = {"only_largest": only_largest, "signs": signs, "rounded": rounded}


# Codecs -------------------------------------------------------------------------------------------

Rounding = Callable[[Tensor], Tensor]
Codec = tuple[Callable[..., Tensor], Callable[..., Tensor]]


def _with_scale(exponent: Tensor, codes: Tensor) -> Tensor:
    # A vector: older versions of PyTorch take a scalar to the default dtype.
    unit = torch.full((1,), 257.0, dtype=torch.float32, device=codes.device)
    return torch.cat([torch.ldexp(unit, exponent).view(torch.uint8), codes])


def _scale(wire: Tensor) -> Tensor:
    return wire[:4].clone().view(torch.float32)


def encode_bytes(x: Tensor, rounded: Rounding = torch.round) -> Tensor:
    """Return n + 4 bytes: a scale, and each number divided by the scale and `rounded`."""
    largest = x.abs().max() if x.numel() else x.sum()
    exponent = torch.frexp(largest / (127 * 257)).exponent
    codes = rounded(torch.ldexp(x, -exponent) / 257).to(torch.int8)
    return _with_scale(exponent, codes.view(torch.uint8))


def decode_bytes(wire: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the tensor that `encode_bytes` has compressed."""
    return (wire[4:].clone().view(torch.int8) * _scale(wire)).view(shape).to(dtype)


def encode_signs(x: Tensor, rounded: Rounding = torch.round) -> Tensor:
    """Return 4 + ceil(n / 8) bytes: a scale, and a bit for each number, 1 if it is below zero."""
    largest = x.abs().max() if x.numel() else x.sum()
    exponent = torch.frexp(largest).exponent - 8  # scale above the largest: encoding twice shows
    bits = torch.nn.functional.pad((x < 0).to(torch.uint8), (0, -x.numel() % 8)).view(-1, 8)
    powers = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=x.device)
    return _with_scale(exponent, (bits * powers).sum(1).to(torch.uint8))


def decode_signs(wire: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the tensor that `encode_signs` has compressed."""
    n = torch.Size(shape).numel()
    bits = (wire[4:, None] >> torch.arange(8, device=wire.device)) & 1
    signs = 1 - 2 * bits.reshape(-1)[:n].float()
    return (signs * _scale(wire)).view(shape).to(dtype)


CODECS: Mapping[str, Codec] = {
    "8 bits": (encode_bytes, decode_bytes),
    "1 bit": (encode_signs, decode_signs),
}
