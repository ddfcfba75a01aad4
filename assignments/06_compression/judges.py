"""Judges of bytes on a wire, which they read as a receiver would, and of random places.

They first count the bytes, and name the mistake that gives a wrong number of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from course_lib.checking import Case, Wrong, expect_equal, expect_tensor
from course_lib.checking.answers import ANYTHING, describe, sees
from course_lib.checking.judges import ENOUGH, equally_likely
from course_lib.ranks.explain.words import counted


def expect_wire(value: Any, nbytes: int, formula: str, mistakes: Mapping[int, str]) -> None:
    """Raise `Wrong` unless `value` is a vector of `nbytes` bytes, uint8.

    Args:
        value: the value that rank 0 returned, which may be anything.
        nbytes: the number of bytes that it must have.
        formula: how this number is computed, in words.
        mistakes: number of bytes → the mistake that gives it.

    """
    if not isinstance(value, Tensor) or value.dtype != torch.uint8 or value.dim() != 1:
        text = describe(value)
        if isinstance(value, Tensor):
            text = f"a {value.dtype} tensor of shape {list(value.shape)} ({value.nbytes} bytes)"
        raise Wrong(
            f"rank 0: wire is {text}, expected a vector of {nbytes} bytes (uint8)",
            "Return one vector of bytes: x.view(torch.uint8) gives the bytes of a vector, and "
            "torch.cat joins vectors.",
        )
    if value.numel() != nbytes:
        raise Wrong(
            f"rank 0: wire has {counted(value.numel(), 'byte')}, expected {nbytes}: {formula}",
            mistakes.get(value.numel(), ""),
        )


# A byte for each number ---------------------------------------------------------------------------


def uniform(ticks: Tensor) -> Tensor:
    """Return ``u``, numbers in [0, 1), as float32, or as float64 if their number is even."""
    dtype = torch.float32 if ticks.numel() % 2 else torch.float64
    return ticks.to(dtype) * 2.0**-24


@sees(lambda case, inputs, rank: {"wire": ANYTHING, "u": uniform(inputs[rank]["ticks"])})
def reads_codes(case: Case, inputs: Any, expected: Any, values: Sequence[Any]) -> None:
    """Judge ``wire`` (four bytes of scale, a code for each number), and that ``u`` is unchanged."""
    x, u, wire = inputs[0]["x"], uniform(inputs[0]["ticks"]), values[0]["wire"]
    n = x.numel()
    wrong_sizes = {
        n: "Where is the scale? The receiver needs it.",
        n + 8: "The scale must be float32, 4 bytes.",
        4 * n + 4: "A code must be one byte (int8), not four bytes.",
    }
    expect_wire(wire, n + 4, "4 for the scale, 1 for each number", wrong_sizes)
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


@sees({"wire": ANYTHING})
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
    expect_wire(wire, 4 * k + min(4 * k, bitmap), formula, wrong_sizes)
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


# Places drawn at random ---------------------------------------------------------------------------

# Any draw is right whose places are the same on all ranks, and different for a different seed, if
# all sets of k places are equally likely.

LIKELY = 10**9
"""If there are this many possible draws, no two are equal by chance."""
ROUNDINGS = 16
"""Each is half of eps, relative to the result: the factors n, 1/k and 1/K may be applied alone."""


@sees(lambda case, inputs, rank: {"results": [ANYTHING] * len(inputs[rank]["seeds"])})
def fair_means(case: Case, inputs: Any, expected: Any, values: Sequence[Any]) -> None:
    """Judge ``results``, one for each seed: the places that are not zero, then the values."""
    k, seeds = inputs[0]["k"], inputs[0]["seeds"]
    for members in case.groups:
        drawn = {r: _places(values[r]["results"], inputs[r], r) for r in members}
        first = drawn[members[0]]
        for rank in members[1:]:
            if not torch.equal(drawn[rank], first):
                raise Wrong(
                    f"rank {rank} draws other places than rank {members[0]}",
                    "All ranks must draw from the same seed, so that they add the values of the "
                    "same places.",
                )
        _expect_fair(seeds, first, k)
        for rank in members:
            _expect_means([inputs[r]["x"] for r in members], k, seeds, values[rank], rank)


def _places(results: Sequence[Any], member: Any, rank: int) -> Tensor:
    """Return the places of a rank's results, shape (seeds, n), after counting them."""
    k, name = member["k"], f"rank {rank}: the result"
    places = torch.stack([expect_tensor(x, member["x"], name).flatten() != 0 for x in results])
    for seed, count in zip(member["seeds"], places.sum(1).tolist(), strict=True):
        if count != k:
            raise Wrong(
                f"rank {rank}: the result for seed {seed} has {counted(count, 'number')} that "
                f"{'is' if count == 1 else 'are'} not zero, expected k = {k}",
                "Keep only the k places that were drawn."
                if count > k
                else "Draw k different places: draw without replacement.",
            )
    return places


def _expect_fair(seeds: Sequence[int], places: Tensor, k: int) -> None:
    """Judge whether equal seeds draw equally, and different ones each set of k equally often."""
    (draws, n), first = places.shape, {}
    for i, seed in enumerate(seeds):
        if not torch.equal(places[i], places[first.setdefault(seed, i)]):
            raise Wrong(f"seed {seed} draws other places in the second call than in the first")
    kinds, counts = places[list(first.values())].unique(dim=0, return_counts=True)
    if math.comb(n, k) > LIKELY and len(kinds) < len(first):
        twice = kinds[counts.argmax()]
        a, b, *_ = (s for s, i in first.items() if torch.equal(places[i], twice))
        raise Wrong(
            f"seeds {a} and {b} draw the same places",
            "A different seed must give a different draw: use the whole seed, unchanged.",
        )
    if len(first) < ENOUGH * math.comb(n, k) or math.comb(n, k) == 1:
        return
    if not equally_likely(counts.tolist(), math.comb(n, k)):
        commonest = int(counts.argmax())
        raise Wrong(
            f"the set of places {kinds[commonest].nonzero().flatten().tolist()} is drawn for "
            f"{counts[commonest] / draws:.0%} of {draws} seeds, expected {1 / math.comb(n, k):.0%}",
            "All sets of k places must be equally likely: only then is the result right on "
            "average. Take the first k numbers of torch.randperm, or use random.sample.",
        )


def _expect_means(
    everyone: Sequence[Tensor], k: int, seeds: Sequence[int], value: Any, rank: int
) -> None:
    """Judge that every drawn place has n/k times the mean over the group."""
    x, size = everyone[0], len(everyone)
    total, scale = torch.stack(everyone).double().sum(0), x.numel() / k
    mistakes = {
        "the mean over the ranks: multiply it by n/k, so that it is right on average": 1 / size,
        "n/k times the sum over the ranks: the task asks for the mean": scale,
        "the sum over the ranks: divide it by K, and multiply it by n/k": 1,
    }
    rtol = ROUNDINGS * torch.finfo(x.dtype).eps / 2
    for seed, got in zip(seeds, value["results"], strict=True):

        def times(factor: float, drawn: Tensor = got != 0) -> Tensor:
            return torch.where(drawn, total * factor, 0).to(x.dtype)

        lookalikes = [(label, times(factor)) for label, factor in mistakes.items()]
        name = f"rank {rank}: the result for seed {seed}"
        expect_equal(got, times(scale / size), name, rtol=rtol, atol=0, lookalikes=lookalikes)
