"""Counts of random results: what chance gives passes, and a bias is found."""

from collections import Counter

import pytest
import torch

from course_lib.checking.judges import ENOUGH, equally_likely


def counts(kinds: int, seed: int, bias: float = 0.0) -> Counter[int]:
    """Return how often each of the kinds comes; a share `bias` of the draws becomes kind 0."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(kinds, (ENOUGH * kinds,), generator=generator)
    forced = torch.rand(len(draws), generator=generator) < bias
    return Counter(torch.where(forced, 0, draws).tolist())


@pytest.mark.parametrize("kinds", [2, 6, 30])
def test_what_chance_gives_is_not_refused(kinds: int) -> None:
    assert all(equally_likely(counts(kinds, seed).values(), kinds) for seed in range(500))


@pytest.mark.parametrize(("kinds", "bias"), [(6, 0.3), (30, 0.2)])
def test_a_bias_is_found(kinds: int, bias: float) -> None:
    assert not any(equally_likely(counts(kinds, seed, bias).values(), kinds) for seed in range(100))
