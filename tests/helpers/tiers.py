"""The tests that `make test` runs, where there is one per assignment or per mistake.

All of them take an hour, in `make test-all`. These rules put the mark ``large`` on the tests that
`make test` leaves out:

- Of each assignment, the solutions pass on the simulated network, and a sample of the wrong ones is
  found there. Its first task is tested in all other ways.
- The assignments of `IN_FULL` are also examined in the grader's sandbox.

After a change to an assignment, run all of it: ``make test-all ARGS="-k 05_bucketing"``.
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


def in_tiers(worlds: list[tuple[str, int]]) -> list[Any]:
    """Return a parameter for each kind and number of ranks, in its tier.

    `make test` takes two numbers of simulated ranks: one rank, and one where left and right differ.
    CPU ranks run the same code, so one number of them is enough.
    """
    by_default = [("simulated", 1), ("simulated", 3), ("cpu", 3)]
    return [pytest.param(*world, marks=tier(world in by_default)) for world in worlds]
