"""Places drawn by lot: the same on all ranks, others for another seed, each equally often."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from course_lib.checking.answers import ANYTHING, sees
from course_lib.checking.cases import Case, Wrong
from course_lib.checking.compare import expect_close, expect_tensor
from course_lib.checking.judges import TOLERANCE
from course_lib.checking.shared.sums import exact_numbers, numel
from course_lib.ranks.explain.words import counted

ENOUGH = 100
"""Draws from which on it is judged how often each place is drawn."""
LIKELY = 10**9
"""Of so many draws no two are equal by chance."""
SIGMAS = 6
"""How far chance may be off: more, in one of 500 million places."""


def inputs_above_zero(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Draw ``x`` above zero, so that no sum is zero; ``k`` and ``seeds`` beside.

    The sums are exact in the case's dtype, and in no smaller one.
    """
    shape, world_size = tuple(case.parameters["shape"]), case.world_size
    drawn = [exact_numbers(case, generator, shape) for _ in range(world_size)]
    drawn = [torch.where(x == 0, 1, x).abs() for x in drawn]
    known = {"k": case.parameters["k"], "seeds": list(case.parameters["seeds"])}
    return [{"x": x, **known} for x in drawn]


def _one_for_each_seed(case: Case, inputs: Sequence[Any], rank: int) -> Any:
    return {"results": [ANYTHING] * len(case.parameters["seeds"])}


@sees(_one_for_each_seed)
def draws_places(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
    """Judge where ``results``, one for each seed, are not zero; then comes `has_values`."""
    k, seeds, n = case.parameters["k"], case.parameters["seeds"], numel(case)
    for members in case.groups:
        first = _places(values[members[0]], inputs[members[0]], members[0])
        for rank in members:
            found = _places(values[rank], inputs[rank], rank)
            for seed, count in zip(seeds, found.sum(1).tolist(), strict=True):
                if count != k:
                    raise Wrong(
                        f"rank {rank}: the result for seed {seed} has {counted(count, 'number')} "
                        f"that {'is' if count == 1 else 'are'} not zero, expected k = {k}",
                        _HINTS.get((count > k), ""),
                    )
            if not torch.equal(found, first):
                raise Wrong(
                    f"rank {rank} draws other places than rank {members[0]}",
                    "All ranks must draw from the same seed, or they add what does not fit.",
                )
        for seed, places in zip(seeds, first, strict=True):
            if not torch.equal(places, first[seeds.index(seed)]):
                raise Wrong(f"seed {seed} draws other places when it comes again")
        if math.comb(n, k) > LIKELY:
            _drawn_anew(seeds, first)
        if len(seeds) >= ENOUGH:
            _drawn_equally_often(first, k / n)


_HINTS = {
    True: "Only what was drawn is sent.",
    False: "Draw k different places: without putting them back.",
}


def _drawn_anew(seeds: Sequence[int], places: Tensor) -> None:
    for i, seed in enumerate(seeds):
        for j in range(i):
            if seeds[j] != seed and torch.equal(places[i], places[j]):
                raise Wrong(
                    f"seeds {seeds[j]} and {seed} draw the same places",
                    "Another seed must give another draw: use all of the number, as it is.",
                )


def _drawn_equally_often(places: Tensor, expected: float) -> None:
    often = places.double().mean(0)
    chance = (expected * (1 - expected) / len(places)) ** 0.5
    worst = int((often - expected).abs().argmax())
    if abs(often[worst] - expected) > SIGMAS * chance:
        raise Wrong(
            f"place {worst} is drawn for {often[worst]:.0%} of {len(places)} seeds, expected "
            f"{expected:.0%}",
            "Each seed draws other places, each place equally often: only then is the result right "
            "on average.",
        )


def _places(value: Any, own: Any, rank: int) -> Tensor:
    what = f"rank {rank}: the result"
    return torch.stack([expect_tensor(x, own["x"], what).flatten() != 0 for x in value["results"]])


@sees(_one_for_each_seed)
def has_values(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
    """Judge that there is n/k times the mean over the group where something was drawn."""
    k, n = case.parameters["k"], numel(case)
    rtol = TOLERANCE[case.form.dtype]
    for members in case.groups:
        theirs = [inputs[rank]["x"].double() for rank in members]
        total, size = torch.stack(theirs).sum(0), len(members)
        mean = total / size
        for rank in members:
            x = inputs[rank]["x"]
            known = {
                "n/k times the sum over the ranks: the mean is asked for": total * n / k,
                "the mean over the ranks: it must be scaled by n/k to be right on average": mean,
                "the sum over the ranks: it must be divided by K, and scaled by n/k": total,
                "the mean scaled by k/n: what is drawn rarely must count more, n/k": mean * k / n,
                "the mean divided by the number of ranks once more": mean * n / k / size,
                "n/k times this rank's own numbers: nothing was added": x.double() * n / k,
                "the mean over all ranks: the group has fewer": n
                / k
                * torch.stack([each["x"].double() for each in inputs]).mean(0),
            }
            for seed, got in zip(case.parameters["seeds"], values[rank]["results"], strict=True):
                drawn = got != 0
                right = torch.where(drawn, mean * n / k, 0).to(x.dtype)
                lookalikes = {
                    name: torch.where(drawn, each, 0).to(x.dtype) for name, each in known.items()
                }
                what = f"rank {rank}: the result for seed {seed}"
                expect_close(got, right, what, rtol=rtol, atol=rtol / 10, lookalikes=lookalikes)
