"""Codecs that a check hands to a student's function, and whose every result is exact.

All scales are 257 times a power of two: with numbers that are multiples of one
(`sums.exact_numbers`), float32 rounds nothing but what a codec rounds, and a sum of decoded tensors
is the same in every order. But bfloat16 rounds the scale itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from course_lib.checking.cases import Case
from course_lib.checking.judges import Oracle, equals
from course_lib.checking.shared.sums import EXACT, in_calls

Rounding = Callable[[Tensor], Tensor]


def _vector(x: Tensor) -> Tensor:
    if x.dim() != 1 or x.dtype != torch.float32:
        raise TypeError(f"encode takes a float32 vector, not {x.dtype} of shape {list(x.shape)}")
    return x.detach()


def _with_scale(exponent: Tensor, codes: Tensor) -> Tensor:
    scale = torch.ldexp(torch.full((), 257.0, device=codes.device), exponent)
    return torch.cat([scale.reshape(1).view(torch.uint8), codes])


def _scale(wire: Tensor) -> Tensor:
    return wire[:4].clone().view(torch.float32)


def encode_bytes(x: Tensor, rounded: Rounding = torch.round) -> Tensor:
    """Return n + 4 bytes: a scale, and each number by it, `rounded`."""
    x = _vector(x)
    largest = x.abs().max() if x.numel() else x.sum()
    exponent = torch.frexp(largest / (127 * 257)).exponent
    codes = rounded(torch.ldexp(x, -exponent) / 257).to(torch.int8)
    return _with_scale(exponent, codes.view(torch.uint8))


def decode_bytes(wire: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return what `encode_bytes` made small."""
    return (wire[4:].clone().view(torch.int8) * _scale(wire)).view(shape).to(dtype)


def encode_signs(x: Tensor, rounded: Rounding = torch.round) -> Tensor:
    """Return 4 + ceil(n / 8) bytes: a scale, and a bit for each number, 1 below zero."""
    x = _vector(x)
    largest = x.abs().max() if x.numel() else x.sum()
    exponent = torch.frexp(largest).exponent - 9
    bits = torch.nn.functional.pad((x < 0).to(torch.uint8), (0, -x.numel() % 8)).view(-1, 8)
    powers = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=x.device)
    return _with_scale(exponent, (bits * powers).sum(1).to(torch.uint8))


def decode_signs(wire: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return what `encode_signs` made small."""
    n = torch.Size(shape).numel()
    bits = (wire[4:, None] >> torch.arange(8, device=wire.device)) & 1
    signs = 1 - 2 * bits.reshape(-1)[:n].float()
    return (signs * _scale(wire)).view(shape).to(dtype)


FEW = 3

Codec = tuple[Callable[..., Tensor], Callable[..., Tensor]]
CODECS: Mapping[str, Codec] = {
    "8 bits": (encode_bytes, decode_bytes),
    "1 bit": (encode_signs, decode_signs),
}


def handed_out(name: str) -> Codec:
    """Return a codec for a student's function; a vector that comes again is rounded another way.

    So does a codec that rounds at random, and then not all ranks hold the same sum. Of few numbers
    two shards may be equal by chance: those are rounded alike.
    """
    encode, decode = CODECS[name]
    seen: set[bytes] = set()

    def encode_once(x: Tensor) -> Tensor:
        numbers = _vector(x).cpu().numpy().tobytes()
        rounded = torch.floor if x.numel() > FEW and numbers in seen else torch.round
        seen.add(numbers)
        return encode(x, rounded)

    encode_once.__qualname__ = encode.__qualname__  # which of them it is
    return encode_once, decode


def round_trip(codec: Codec, x: Tensor) -> Tensor:
    """Return C(x) of a float32 vector."""
    encode, decode = codec
    return decode(encode(x), x.shape, torch.float32)


# Sums of what they make, shard by shard -----------------------------------------------------------

Compress = Callable[[Codec, Tensor], Tensor]


def _exactly(codec: Codec, x: Tensor) -> Tensor:
    return x


def compressed_sum(
    parts: Compress = round_trip, sums: Compress = round_trip, shards: int | None = None
) -> Oracle:
    """Return an oracle of C(Σ C(tensor)) for the case's ``codec``, in so many shards, or K.

    `parts` and `sums` compress what the ranks send first, and the sums.
    """

    def oracle(case: Case, inputs: Sequence[Any], me: int) -> dict[str, Tensor]:
        codec, count = CODECS[case.parameters["codec"]], shards or len(inputs)

        def total(ins: Sequence[Any], _: int) -> Tensor:
            cut = [each["tensor"].float().flatten().tensor_split(count) for each in ins]
            totals = [
                sums(codec, torch.stack([parts(codec, each) for each in same]).sum(0))
                for same in zip(*cut, strict=True)
            ]
            like = ins[0]["tensor"]
            return torch.cat(totals).view(like.shape).to(like.dtype)

        expected: dict[str, Tensor] = in_calls("tensor", total)(case, inputs, me)
        return expected

    return oracle


equals_compressed_sum = equals(
    compressed_sum(),
    {
        "Σ C(x): the sums are sent as they are, not compressed": compressed_sum(sums=_exactly),
        "C(Σ x): what each rank sends at first is not compressed": compressed_sum(parts=_exactly),
        "Σ x: nothing is compressed": compressed_sum(_exactly, _exactly),
        "a tensor compressed as a whole: each shard is encoded by itself": compressed_sum(shards=1),
        "what this rank had before: nothing was written into it": in_calls(
            "tensor", lambda inputs, me: inputs[me]["tensor"]
        ),
        "the mean: nobody asked to divide": lambda case, inputs, me: {
            name: value / len(inputs) for name, value in compressed_sum()(case, inputs, me).items()
        },
    },
    tolerance=EXACT,
)
"""Judge ``tensor`` by C(Σ C(tensor)) over the group."""
