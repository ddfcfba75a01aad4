"""Which tests `make test` runs, where there is one for every assignment, or for every mistake.

All of them take an hour; `make test-all` runs all, and each of these rules is a mark ``large`` on
what `make test` leaves out:

- The assignments of `IN_FULL` are tested in all ways, their wrong solutions in samples.
- Of every other, what costs little: its files keep to the rules, a function that was not written
  fails every case, its solutions pass on the simulated network, and of its wrong ones one in so
  many is found there.

Who changes an assignment runs all of it: ``make test-all ARGS="-k 05_bucketing"``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

IN_FULL = ("02_data_parallel_sgd", "09_sharding_the_model")
"""Functions on gradients that ranks exchange; schedules, optimizers and layers that are cut up."""


def tier(by_default: bool) -> Any:
    """Return the marks of a parameter: none where `make test` runs it too."""
    return () if by_default else pytest.mark.large


def in_full(folder: Path) -> bool:
    """Return whether `make test` tests this assignment in all ways."""
    return folder.name in IN_FULL


def assignments_in_tiers(folders: list[Path]) -> list[Any]:
    """Return a parameter for each assignment, in its tier."""
    return [pytest.param(each, id=each.name, marks=tier(in_full(each))) for each in folders]


def sampled(folder: Path, number: int, *, one_in: int, of_others: int = 0) -> bool:
    """Return whether wrong solution `number` of an assignment is one that `make test` tries.

    One in so many is, of the assignments of `IN_FULL` and of the others; 0 is none.
    """
    every = one_in if in_full(folder) else of_others
    return every > 0 and number % every == 0
