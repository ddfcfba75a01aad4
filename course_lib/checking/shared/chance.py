"""Random results, judged by counting."""

from __future__ import annotations

from collections.abc import Iterable

import torch

ENOUGH = 50
"""A distribution is judged if each result is expected at least so often."""
CHANCE = 1e-9
"""If a right function gives such counts more rarely, they are wrong."""


def equally_likely(counts: Iterable[int], kinds: int) -> bool:
    """Return whether chance alone may give these counts, by Pearson's χ².

    Args:
        counts: how often each result came; those that never came may be missing.
        kinds: the number of results that are possible, at least two, all equally likely.

    """
    seen = torch.tensor(list(counts), dtype=torch.float64)
    expected = seen.sum() / kinds
    never = (kinds - len(seen)) * expected
    chi2 = ((seen - expected) ** 2 / expected).sum() + never
    freedom = torch.tensor((kinds - 1) / 2, dtype=torch.float64)
    return bool(torch.special.gammaincc(freedom, chi2 / 2) > CHANCE)
