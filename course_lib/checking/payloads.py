"""Compressed tensors on the wire: inputs whose answers are exact, and judges that read the bytes.

Bytes are judged as bytes first: how many, and what a wrong number of them looks like. Then they are
read as whoever receives them would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from course_lib.checking.answers import ANYTHING, sees
from course_lib.checking.cases import Case, Wrong
from course_lib.checking.compare import describe
from course_lib.checking.judges import Oracle, equals
from course_lib.checking.shared.sums import EXACT, numel


def expect_wire(value: Any, nbytes: int, formula: str, what: str, known: Mapping[int, str]) -> None:
    """Raise `Wrong` unless `value` is a vector of so many bytes, uint8.

    Args:
        value: what a rank returned; anything.
        nbytes: how many bytes it must have.
        formula: where the number comes from, in words.
        what: whose it is: ``rank 0: wire``.
        known: number of bytes → the mistake that looks like it.

    """
    if not isinstance(value, Tensor) or value.dtype != torch.uint8 or value.dim() != 1:
        said = describe(value)
        if isinstance(value, Tensor):
            said = f"{value.dtype} of shape {list(value.shape)}, {value.nbytes} bytes"
        raise Wrong(
            f"{what} is {said}, expected a vector of {nbytes} bytes, uint8",
            "What is sent is one vector of bytes: x.view(torch.uint8) shows a vector's bytes, and "
            "torch.cat puts vectors one behind the other.",
        )
    if value.numel() != nbytes:
        raise Wrong(
            f"{what} has {value.numel()} bytes, expected {nbytes}: {formula}",
            known.get(value.numel(), ""),
        )


# A byte for each number ---------------------------------------------------------------------------


def quantized_inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Draw ``x``, in eighths of a power of two up to 127 times it, and ``ticks`` of 2⁻²⁴, int64.

    x/s + u is 2⁻¹³ away from a multiple of 1/8: float32 tells on which side, no smaller dtype.

    Parameters: ``shape``; ``exponent`` of the power; ``sign`` of the largest, 0 for all zeros.
    """
    shape, sign = tuple(case.parameters["shape"]), case.parameters["sign"]
    drawn = []
    for _ in range(case.world_size):
        eighths = torch.randint(-1016, 1017, shape, generator=generator).flatten()
        # At most 8 significant bits: of more, bfloat16 would round some.
        for most in (256, 512):
            eighths = torch.where(
                eighths.abs() < most, eighths, eighths // (most // 64) * most // 64
            )
        most = 4 * int(torch.randint(200, 255, (), generator=generator))
        eighths = eighths.clamp(-most, most)
        at = int(torch.randint(max(eighths.numel(), 1), (), generator=generator))
        eighths[at : at + 1] = most
        side = torch.randint(2, eighths.shape, generator=generator) * 2 - 1
        between = torch.randint(8, eighths.shape, generator=generator) / 8 + side * 2.0**-13
        ticks = ((between - sign * 127 * eighths.double() / most) % 1 * 2**24).long()
        if sign > 0:
            ticks[at : at + 1] = 2**24 - 1  # 127 + u is 128 in float32
        x = eighths * (sign * 2.0 ** (case.parameters["exponent"] - 3))
        drawn.append({"x": x.view(shape), "ticks": ticks.view(shape)})
    return drawn


def uniform(ticks: Tensor) -> Tensor:
    """Return ``u``, numbers in [0, 1): float32 or, of an even number of them, float64."""
    dtype = torch.float32 if ticks.numel() % 2 else torch.float64
    return ticks.to(dtype) * 2.0**-24


def codes_of(own: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scale s = max|x|/127, and x/s and u, in double precision."""
    x, u = own["x"].double().flatten(), uniform(own["ticks"]).double().flatten()
    scale = x.abs().max() / 127 if x.numel() else x.sum()
    return scale, x / torch.where(scale == 0, 1, scale), u


@sees(lambda case, inputs, rank: {"wire": ANYTHING, "u": uniform(inputs[rank]["ticks"])})
def reads_codes(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
    """Judge ``wire``, four bytes of scale and a code for each number, and ``u``, left as it was."""
    read = []
    for rank, (own, value) in enumerate(zip(inputs, values, strict=True)):
        n, wire = own["x"].numel(), value["wire"]
        known = {
            n: "Where is the scale? Whoever decodes needs it.",
            n + 8: "The scale is float32, 4 bytes.",
            n + 2: "The scale is float32, 4 bytes.",
            4 * n + 4: "A code is one byte: int8, not a number of four.",
        }
        expect_wire(wire, n + 4, "4 for the scale, 1 for each number", f"rank {rank}: wire", known)
        if not torch.equal(value["u"], uniform(own["ticks"])):
            raise Wrong(f"rank {rank}: the function changes u, which is not its to change")
        scale, codes = wire[:4].clone().view(torch.float32), wire[4:].view(torch.int8)
        read.append({"scale": scale, "codes": codes.double()})
    _codes(case, inputs, read)


def _with(rounding: Callable[[Tensor, Tensor], Tensor]) -> Oracle:
    def oracle(case: Case, inputs: Sequence[Any], me: int) -> Any:
        _, scaled, u = codes_of(inputs[me])
        return {"codes": rounding(scaled, u)}

    return oracle


def _right(case: Case, inputs: Sequence[Any], me: int) -> Any:
    scale, scaled, u = codes_of(inputs[me])
    codes = (scaled + u).floor().clamp(max=127)
    return {"scale": scale.float().view(1), "codes": codes}


_codes = equals(
    _right,
    {
        "x/s rounded to the nearest: u decides, up or down": _with(lambda x, u: x.round()),
        "⌊x/s⌋: every number is rounded down": _with(lambda x, u: x.floor()),
        "x/s + u cut off towards zero: numbers below zero are rounded up, and biased": _with(
            lambda x, u: (x + u).trunc().clamp(max=127)
        ),
        "x/s cut off towards zero, whatever u is": _with(lambda x, u: x.trunc()),
        "the right codes but for 128, which int8 does not have": _with(
            lambda x, u: torch.where((x + u).float() == 128, -128, (x + u).floor())
        ),
        "codes that u moves the wrong way: ⌊x/s + u⌋ adds it": _with(
            lambda x, u: (x - u).ceil().clamp(min=-127)
        ),
    },
    tolerance=dict.fromkeys(EXACT, 1e-6),  # of the scale: max|x| by 127, or times 1/127
    absolute=EXACT,
)


# The largest numbers, and where they are ----------------------------------------------------------


def distinct_inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Draw ``x`` of the case's ``shape``, no two of whose absolute values are equal; one is 0."""
    n = numel(case)
    order = torch.randperm(n, generator=generator)
    # Each of 8 significant bits: bfloat16 rounds none.
    sizes = torch.where(order == 0, 0, (128 + order % 128) / 256 * 2.0 ** (order // 128))
    signs = torch.randint(2, (n,), generator=generator) * 2 - 1
    return [{"x": (sizes * signs).view(tuple(case.parameters["shape"]))}]


@sees({"wire": ANYTHING})
def reads_top_k(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
    """Judge ``wire``: the ``k`` largest values, and where they are."""
    x, k, wire = inputs[0]["x"], case.parameters["k"], values[0]["wire"]
    n, size = x.numel(), x.element_size()
    bitmap = -(-n // 8)
    own_dtype = "Values are float32 on the wire, whatever dtype x has."
    known = {
        4 * k + n // 8: "The last byte of a bitmap is filled up with zeros, and not left out.",
        size * k + 4 * k: own_dtype,
        size * k + bitmap: own_dtype,
        size * k + 8 * k: own_dtype,
        4 * k + n: "A bool is a whole byte: eight bits go into one.",
        4 * k + 8 * bitmap: "A bool is a whole byte: eight bits go into one.",
        4 * n: "Zeros take as many bytes as any number: send the k values and their places.",
        4 * k: "Where were they? Whoever decodes needs their places.",
        12 * k: "PyTorch's indices are int64, 8 bytes each: int32 is enough.",
        8 * k: "Here the bitmap, one bit for each number, is the smaller list of places.",
        4 * k + bitmap: "Here k places of 4 bytes take fewer than the bitmap.",
    }
    formula = f"4 k + min(4 k, ceil(n/8)) with k = {k}, n = {n}"
    expect_wire(wire, 4 * k + min(4 * k, bitmap), formula, "rank 0: wire", known)
    right = largest_values(x, k)
    got, reverse = read_top_k(wire, n, k), read_top_k(wire, n, k, highest_first=True)
    is_right, is_reversed = (x is not None and torch.equal(x, right) for x in (got, reverse))
    bits = (wire[4 * k :, None] >> torch.arange(8)).bitwise_and(1).flatten()[:n]
    if bitmap == 4 * k > 0 and torch.equal(bits, (right != 0).to(torch.uint8)):
        raise Wrong(
            "rank 0: wire: the places are a bitmap, expected a list",
            f"{n} bits take {bitmap} whole bytes, as many as the list: then send the list.",
        )
    if is_reversed and not is_right:
        raise Wrong(
            "rank 0: wire: the first element has the highest bit of its byte, expected the lowest",
            "Element i is bit i mod 8 of byte i // 8: bits[0] + 2 bits[1] + 4 bits[2] + …",
        )
    if got is None:
        raise Wrong(
            f"rank 0: wire: the places in it are not {k} different numbers from 0 to {n - 1}",
            "Places count in the flattened x, and the last byte is filled up with zeros.",
        )
    same_values = torch.equal(got.sort().values, right.sort().values)
    if torch.equal(got != 0, right != 0) and same_values and not torch.equal(got, right):
        raise Wrong("rank 0: wire: values and places are right, but not in the same order")
    _largest(case, inputs, [{"decoded": got}])
    if not torch.equal(places_in(wire, k), places_in(wire, k).sort().values):
        raise Wrong("rank 0: wire: the places are right, but not in the order of x")


def largest_values(x: Tensor, k: int) -> Tensor:
    """Return the flattened x, float32, with zeros for all but its k largest |x_i|."""
    return _chosen(x, lambda flat: flat.abs().argsort(descending=True)[:k])


def read_top_k(wire: Tensor, n: int, k: int, highest_first: bool = False) -> Tensor | None:
    """Return the float32 vector that a wire of values and places stands for; None if it is none.

    `highest_first`: read a bitmap as if the first element had the highest bit of its byte.
    """
    values, places = wire[: 4 * k].clone().view(torch.float32), places_in(wire, k, highest_first)
    if (
        len(set(places.tolist())) != k
        or len(places) != k
        or (k and not 0 <= int(places.min()) <= int(places.max()) < n)
    ):
        return None
    return torch.zeros(n).index_put((places,), values)


def places_in(wire: Tensor, k: int, highest_first: bool = False) -> Tensor:
    """Return the places behind the k values of a wire, as they are listed; see `read_top_k`."""
    rest = wire[4 * k :].clone()
    if len(rest) == 4 * k:
        return rest.view(torch.int32).long()
    bits = torch.arange(7, -1, -1) if highest_first else torch.arange(8)
    return ((rest[:, None] >> bits) & 1).flatten().nonzero().flatten()


def _chosen(x: Tensor, choose: Callable[[Tensor], Tensor]) -> Tensor:
    flat = x.float().flatten()
    places = choose(flat)
    return torch.zeros_like(flat).index_put((places,), flat[places])


def _kept(values: Callable[[Tensor, int], Tensor]) -> Oracle:
    return lambda case, inputs, me: {"decoded": values(inputs[me]["x"], case.parameters["k"])}


_largest = equals(
    _kept(largest_values),
    {
        "the k largest numbers: their absolute values count": _kept(
            lambda x, k: _chosen(x, lambda flat: flat.argsort(descending=True)[:k])
        ),
        "the k smallest": _kept(lambda x, k: _chosen(x, lambda flat: flat.abs().argsort()[:k])),
        "the absolute values, without signs": _kept(lambda x, k: largest_values(x, k).abs()),
    },
    tolerance=EXACT,
)
