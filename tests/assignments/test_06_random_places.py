"""The reports on a random-k mean: how many places, which, and how often each is drawn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from course_lib.checking import Case
from course_lib.checking.loading import load_module
from tests.helpers.course_folders import RELEASED
from tests.helpers.findings import expect_said, said

checks = load_module(RELEASED / "06_compression" / "checks.py")

K, N = 2, 40  # 780 draws: two seeds may well draw the same
MANY_OF = 20, 60  # of 10^15 draws: they may not


def drawn(seed: int, k: int = K, n: int = N) -> list[int]:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:k].tolist()


def at(places: list[int], n: int = N) -> Tensor:
    return torch.zeros(n).index_fill(0, torch.tensor(places, dtype=torch.long), 3.0)


def places_said(seeds: list[int], *ranks: list[list[int]], k: int = K, n: int = N) -> str:
    parameters = {"k": k, "seeds": seeds, "shape": [n]}
    inputs = [{"x": torch.ones(n)} for _ in ranks]
    values = [{"results": [at(places, n) for places in each]} for each in ranks]
    return said(checks.draws_places, Case("", len(ranks), parameters), inputs, values)


SEEDS = [7, 8, 7]
RIGHT = [drawn(seed) for seed in SEEDS]


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (RIGHT, ""),
        ([*RIGHT[:2], RIGHT[2][:1]], "rank 1: the result for seed 7 has 1 number that is not zero"),
        ([*RIGHT[:2], RIGHT[2][:1]], "draw without replacement"),
        ([*RIGHT[:2], [1, 2, 3]], "has 3 numbers that are not zero, expected k = 2 | Keep only"),
        ([drawn(1), drawn(2), drawn(1)], "rank 1 draws other places than rank 0"),
    ],
)
def test_all_ranks_draw_k_places_and_the_same(second: list[list[int]], words: str) -> None:
    expect_said(places_said(SEEDS, RIGHT, second), words)


def test_the_seed_decides_the_places() -> None:
    again = [drawn(7), drawn(8), drawn(9)]
    expect_said(places_said(SEEDS, again, again), "seed 7 draws other places in the second call")
    k, n = MANY_OF
    anew, same = [drawn(1, k, n), drawn(2, k, n)], [drawn(1, k, n)] * 2
    expect_said(places_said([1, 2], anew, k=k, n=n), "")
    expect_said(places_said([1, 2], same, k=k, n=n), "seeds 1 and 2 draw the same places")
    assert places_said([1, 2], [drawn(1)] * 2) == ""  # of so few draws, it may be chance


def biased(seed: int, often: float) -> list[int]:
    """Return 2 of 4 places; with this chance the first one is 0 if it was not drawn."""
    places = drawn(seed, 2, 4)
    force = torch.rand((), generator=torch.Generator().manual_seed(seed + 10**6)) < often
    return [0, places[1]] if force and 0 not in places else places


def test_every_set_of_places_is_equally_likely() -> None:
    seeds = list(range(1500))
    words = "All sets of k places must be equally likely"
    for k, n in ((2, 4), (1, 5), (2, 5), (4, 4)):
        assert places_said(seeds, [drawn(seed, k, n) for seed in seeds], k=k, n=n) == ""
    expect_said(places_said(seeds, [biased(seed, 0.3) for seed in seeds], n=4), words)
    expect_said(places_said(seeds, [biased(seed, 0.3) for seed in seeds], n=4), "place 0 for 6")
    blocks = [[at := drawn(seed, 1, 5)[0], (at + 1) % 5] for seed in seeds]
    expect_said(places_said(seeds, blocks, n=5), words)


X = [torch.arange(1.0, 5.0), torch.arange(2.0, 6.0)]
MEAN = (X[0] + X[1]) / 2
WHERE = torch.tensor([0.0, 1.0, 0.0, 1.0])


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (2 * MEAN, ""),
        (4 * MEAN, "n/k times the sum over the ranks"),
        (MEAN, "multiply it by n/k, so that it is right on average"),
        (7 * MEAN, "(2 of 4 elements differ)"),
    ],
)
def test_what_was_drawn_stands_for_the_rest(result: Tensor, words: str) -> None:
    case = Case("", 2, {"k": 2, "seeds": [1], "shape": [4]})
    inputs: list[Any] = [{"x": x} for x in X]
    values = [{"results": [WHERE * result]}] * 2
    expect_said(said(checks.has_values, case, inputs, values), words)
