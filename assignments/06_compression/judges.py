"""Judges of bytes on a wire, which they read as a receiver would.

They first count the bytes, and name the mistake that gives a wrong number of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from course_lib.checking import Case, Wrong, expect_equal
from course_lib.checking.answers import describe
from course_lib.ranks.explain.words import counted


def as_wire(value: Any) -> Tensor:
    """Return what a function returned if it is a vector of bytes, else raise TypeError."""
    if isinstance(value, Tensor) and value.dtype == torch.uint8 and value.dim() == 1:
        return value
    text = f" ({value.nbytes} bytes)" if isinstance(value, Tensor) else ""
    raise TypeError(
        f"wire is {describe(value)}{text}, expected a vector of bytes (uint8). x.view(torch.uint8) "
        "gives the bytes of a vector, and torch.cat joins vectors"
    )


def expect_bytes(wire: Tensor, nbytes: int, formula: str, mistakes: Mapping[int, str]) -> None:
    """Raise `Wrong` unless `wire` has `nbytes` bytes.

    Args:
        wire: the vector of bytes that rank 0 returned.
        nbytes: the number of bytes that it must have.
        formula: how this number is computed, in words.
        mistakes: number of bytes → the mistake that gives it.

    """
    if wire.numel() != nbytes:
        raise Wrong(
            f"rank 0: wire has {counted(wire.numel(), 'byte')}, expected {nbytes}: {formula}",
            mistakes.get(wire.numel(), ""),
        )


# A byte for each number ---------------------------------------------------------------------------


def uniform(ticks: Tensor) -> Tensor:
    """Return ``u``, numbers in [0, 1), as float32, or as float64 if their number is even."""
    dtype = torch.float32 if ticks.numel() % 2 else torch.float64
    return ticks.to(dtype) * 2.0**-24


def reads_codes(case: Case, inputs: Any, expected: Any, values: Sequence[Any]) -> None:
    """Judge ``wire`` (four bytes of scale, a code for each number), and that ``u`` is unchanged."""
    x, u, wire = inputs[0]["x"], uniform(inputs[0]["ticks"]), values[0]["wire"]
    n = x.numel()
    wrong_sizes = {
        n: "Where is the scale? The receiver needs it.",
        n + 8: "The scale must be float32, 4 bytes.",
        4 * n + 4: "A code must be one byte (int8), not four bytes.",
    }
    expect_bytes(wire, n + 4, "4 for the scale, 1 for each number", wrong_sizes)
    if not torch.equal(values[0]["u"], u):
        raise Wrong("rank 0: the function changes u. It must leave u as it is: work on u.clone()")
    exact, u = x.double().flatten(), u.double().flatten()
    scaled = exact * 127 / (exact.abs().max() if exact.any() else 1)
    mistakes = {
        "x/s rounded to the nearest integer: let u decide between up and down": scaled.round(),
        "⌊x/s⌋, which rounds every number down: add u before you round": scaled.floor(),
        "the right codes, except that 128 became -128: cut codes off at 127": torch.where(
            (scaled + u).float() == 128, -128, (scaled + u).floor()
        ),
    }
    lookalikes = [(label, {"codes": codes}) for label, codes in mistakes.items()]
    # The scale may be max|x| by 127 or times 1/127. No code is so large that this would matter.
    read, right = _read_codes(wire), _read_codes(expected[0]["wire"])
    expect_equal(read, right, "rank 0", rtol=1e-6, atol=0, lookalikes=lookalikes)


def _read_codes(wire: Tensor) -> dict[str, Tensor]:
    scale, codes = wire[:4].clone().view(torch.float32), wire[4:].view(torch.int8)
    return {"scale": scale, "codes": codes.double()}


# The largest numbers, and where they are ----------------------------------------------------------


def reads_top_k(case: Case, inputs: Any, expected: Any, values: Sequence[Any]) -> None:
    """Judge ``wire``: the ``k`` largest values, and their places."""
    x, k, wire = inputs[0]["x"].float().flatten(), inputs[0]["k"], values[0]["wire"]
    n, bitmap = x.numel(), -(-x.numel() // 8)
    wrong_sizes = {
        4 * k + 8 * bitmap: "A bool takes a whole byte: pack eight bits into one byte.",
        12 * k: "PyTorch's indices are int64, 8 bytes each: send the places as int32.",
        8 * k: "Here the bitmap, one bit for each number, is smaller than the list of places.",
        4 * k + bitmap: "Here the list, k places of 4 bytes, is smaller than the bitmap.",
    }
    formula = f"4 k + min(4 k, ceil(n/8)) with k = {k}, n = {n}"
    expect_bytes(wire, 4 * k + min(4 * k, bitmap), formula, wrong_sizes)
    right = _read_top_k(expected[0]["wire"], n, k)
    assert right is not None
    got, turned = _read_top_k(wire, n, k), _read_top_k(wire, n, k, highest_first=True)
    is_right = got is not None and torch.equal(got, right)
    if not is_right and turned is not None and torch.equal(turned, right):
        raise Wrong(
            "rank 0: wire: the first element has the highest bit of its byte, expected the lowest",
            "Element i is bit i mod 8 of byte i // 8: bits[0] + 2 bits[1] + 4 bits[2] + …",
        )
    if got is None:
        raise Wrong(
            f"rank 0: wire: the places are not {k} different numbers from 0 to {n - 1}",
            "Count the places in the flattened x, and fill the last byte of a bitmap up with "
            f"zeros. Here the bitmap has {bitmap} whole bytes, and the list {4 * k}: if both are "
            "equally long, send the list.",
        )
    same_values = torch.equal(got.sort().values, right.sort().values)
    if torch.equal(got != 0, right != 0) and same_values and not is_right:
        raise Wrong("rank 0: wire: values and places are right, but not in the same order")
    mistakes = {
        "the k largest numbers: keep the k largest absolute values": _kept(x, x.topk(k).indices),
        "the k smallest absolute values: keep the largest": _kept(x, x.abs().argsort()[:k]),
        "the absolute values, without signs": right.abs(),
    }
    lookalikes = [(label, {"decoded": numbers}) for label, numbers in mistakes.items()]
    expect_equal(
        {"decoded": got}, {"decoded": right}, "rank 0", rtol=0, atol=0, lookalikes=lookalikes
    )
    if not torch.equal(_places_in(wire, k), _places_in(wire, k).sort().values):
        raise Wrong("rank 0: wire: the places are right, but not in the order of x")


def _read_top_k(wire: Tensor, n: int, k: int, highest_first: bool = False) -> Tensor | None:
    """Return the float32 vector that a wire of values and places encodes; None if it is no wire.

    `highest_first` means to read a bitmap as if the first element had the highest bit of its byte.
    """
    values, places = wire[: 4 * k].clone().view(torch.float32), _places_in(wire, k, highest_first)
    if (
        len(set(places.tolist())) != k
        or len(places) != k
        or (k and not 0 <= int(places.min()) <= int(places.max()) < n)
    ):
        return None
    return torch.zeros(n).index_put((places,), values)


def _places_in(wire: Tensor, k: int, highest_first: bool = False) -> Tensor:
    """Return the places after the k values of a wire, in their order; see `_read_top_k`."""
    encoded_places = wire[4 * k :].clone()
    if len(encoded_places) == 4 * k:
        return encoded_places.view(torch.int32).long()
    bits = torch.arange(7, -1, -1) if highest_first else torch.arange(8)
    return ((encoded_places[:, None] >> bits) & 1).flatten().nonzero().flatten()


def _kept(x: Tensor, places: Tensor) -> Tensor:
    return torch.zeros_like(x).index_put((places,), x[places])
