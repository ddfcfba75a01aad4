"""The reports on batches: one mistake of each kind, beside the right ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from course_lib.checking import Case
from course_lib.checking.local import load_module
from tests.helpers.course_folders import RELEASED
from tests.helpers.findings import expect_said, said

judges = load_module(RELEASED / "01_minibatch_sgd" / "judges.py")

EPOCHS = 1000


def orders(n: int, seed: int, biased: bool = False) -> Tensor:
    """Return an order of n rows for each epoch; `biased`: by the shuffle that people write."""
    generator = torch.Generator().manual_seed(seed)
    if not biased:
        return torch.rand(EPOCHS, n, generator=generator).argsort(1)
    rows = torch.arange(n).repeat(EPOCHS, 1)
    for i in range(n):
        j = torch.randint(n, (EPOCHS, 1), generator=generator)  # of all, not of those from i on
        here, there = rows[:, i : i + 1].clone(), rows.gather(1, j)
        rows[:, i : i + 1] = there
        rows.scatter_(1, j, here)
    return rows


def counted(order: Tensor, size: int) -> Tensor:
    """Return a pair of batch and row for each row of each epoch."""
    number = (torch.arange(order.shape[1]) // size).expand_as(order)
    return torch.stack([number, order], -1)


def batches_said(
    n: int = 5, size: int = 2, drop: bool = False, many: Tensor | None = None, **changes: Any
) -> str:
    def cut(order: list[int]) -> list[Tensor]:
        kept = n - n % size if drop else n
        return [torch.tensor(order[at : min(at + size, n)]) for at in range(0, kept, size)]

    two = [cut([*range(n)]), cut([*reversed(range(n))])]
    right = {
        judges.FIRST: two,
        judges.AGAIN: two,
        judges.MANY: counted(orders(n, 1), size) if many is None else many,
    }
    parameters = {"n": n, "batch_size": size, "drop_last": drop}
    case = Case("batches", 1, parameters)
    return said(judges.without_replacement, case, [{"epochs": EPOCHS}], [{**right, **changes}])


def with_pair(batch: int, row: int) -> Tensor:
    pairs = counted(orders(5, 1), 2)
    pairs[3, 4] = torch.tensor([batch, row])
    return pairs


FAIR = counted(orders(6, 2), 2)
PAIRED = torch.stack([2 * orders(3, 3), 2 * orders(3, 3) + 1], -1).flatten(1)
"""Rows 0 and 1, 2 and 3, 4 and 5 are always neighbours; each is everywhere equally often."""


@pytest.mark.parametrize(
    ("n", "size", "many", "words"),
    [
        (6, 2, FAIR, ""),
        (6, 2, FAIR[:, :5], "some epochs have more rows than others"),
        (5, 2, with_pair(3, 0), "not all epochs have 3 batches"),
        (5, 2, with_pair(2, 5), "some epochs have rows that are not among 0 to 4"),
        (6, 2, counted(torch.arange(6).repeat(EPOCHS, 1), 2), "in 1000 of 1000 epochs"),
        (6, 2, counted(PAIRED, 2), "share a full batch in 1000 of 1000 epochs"),
        (8, 1, counted(orders(8, 4), 1), ""),
        (8, 1, counted(orders(8, 4, biased=True), 1), "contain some rows more often than chance"),
    ],
)
def test_many_epochs_of_batches(n: int, size: int, many: Tensor, words: str) -> None:
    expect_said(batches_said(n, size, many=many), words)
