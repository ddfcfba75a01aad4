"""The rows of each rank, judged by PyTorch's sampler with one setting changed."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data.distributed import DistributedSampler

from course_lib.checking import Case, Form
from course_lib.checking.local import load_module
from tests.helpers.course_folders import RELEASED
from tests.helpers.findings import expect_said, said

right_batches = load_module(RELEASED / "04_pytorch_ddp" / "run_judges.py").right_batches

SAMPLING: dict[str, Any] = {"length": 23, "batch_size": 4, "seed": 5, "epochs": [1, 3]}
HALVES = Form(groups=((0, 1), (2, 3)))


def sampled(
    rank: int,
    epoch: int,
    *,
    k: int = 2,
    me: int | None = None,
    shuffle: bool = True,
    seed: int = 5,
    drop: bool = False,
    tell: bool = True,
    short: bool = True,
    size: int = 4,
) -> list[list[int]]:
    """Return the batches of a rank whose group of two begins with an even rank."""
    place = rank % 2 if me is None else me
    sampler: Any = DistributedSampler(range(23), k, place, shuffle, seed, drop)  # type: ignore[arg-type]
    if tell:
        sampler.set_epoch(epoch)
    mine = [int(row) for row in sampler]
    cut = [mine[at : at + size] for at in range(0, len(mine), size)]
    return [batch for batch in cut if short or len(batch) == size]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"tell": False}, "rank 0: epoch 1: expected the batches"),
        ({"tell": False}, "the order of epoch 0: tell the sampler"),
        ({"shuffle": False}, "the rows in their order: shuffle them"),
        ({"seed": 0}, "an order from a different seed"),
        ({"drop": True}, "no row may be lost"),
        ({"me": 0}, "rank 1: epoch 1"),
        ({"me": 0}, "the share of the group's first rank"),
        ({"size": 100}, "all rows in one batch"),
        ({"k": 4}, "the share among all ranks"),
    ],
)
def test_the_batches_of_a_sampler(changes: dict[str, Any], words: str) -> None:
    values = [
        {"epoch {}": {str(e): sampled(rank, e, **changes) for e in SAMPLING["epochs"]}}
        for rank in range(4)
    ]
    case = Case("sampler", 4, SAMPLING, HALVES)
    expect_said(said(right_batches, case, [SAMPLING] * 4, values), words)


def test_a_short_last_batch_is_missed() -> None:
    parameters = {**SAMPLING, "batch_size": 5}
    short = [
        {"epoch {}": {str(e): sampled(r, e, size=5, short=False) for e in (1, 3)}} for r in (0, 1)
    ]
    found = said(right_batches, Case("sampler", 2, parameters), [parameters] * 2, short)
    expect_said(found, "batches without the last, short one")
