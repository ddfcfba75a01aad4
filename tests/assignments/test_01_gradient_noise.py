"""The reports on a wrong variance of a batch's gradient.

The few rows have six batches of two, whose gradients are computed here one by one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from course_lib.checking import Case
from course_lib.checking.local import load_module
from course_lib.checking.shared.training import SHAPES
from tests.helpers.course_folders import RELEASED
from tests.helpers.findings import expect_said, said

judges = load_module(RELEASED / "01_minibatch_sgd" / "judges.py")

ROWS, SIZE, COUNT = 4, 2, 2


def variance_inputs() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    weights = [0.3 * torch.randn(shape, generator=generator) for shape in SHAPES]
    x = torch.randn(ROWS, SHAPES[0][1], generator=generator)
    y = torch.randint(SHAPES[-1][0], (ROWS,), generator=generator)
    return {"weights": weights, "x": x, "y": y, "loss": "cross_entropy", "before": weights}


MINE = variance_inputs()
GRADIENTS = judges.row_gradients(MINE)
BATCHES = [(i, j) for i in range(ROWS) for j in range(i)]
MEANS = {batch: GRADIENTS[list(batch)].mean(0) for batch in BATCHES}


def miss(batch: tuple[int, int]) -> float:
    return float((MEANS[batch] - GRADIENTS.mean(0)).square().sum())


def of(*batches: tuple[int, int]) -> float:
    return sum(map(miss, batches)) / len(batches)


def around_their_own_mean(a: tuple[int, int], b: tuple[int, int]) -> float:
    return float((MEANS[a] - MEANS[b]).square().sum()) / 4


A, B, C = (1, 0), (2, 0), (3, 0)  # of each two rows and the other two, one: they miss by as much
PAIRS = [of(a, b) for a in (A, B, C) for b in (A, B, C)]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (PAIRS, ""),
        ([], ""),
        ([*PAIRS, 3 * max(PAIRS)], "but 2 batches cannot have this mean"),
        ([around_their_own_mean(A, B)], "This is the spread around the mean of the drawn batches"),
        ([of(A, B)] * 3, "is the same number in each of 3 calls"),
        ([of(A, A), of(B, B), of(C, C)], "in every call, |g_B - ∇F|² is the same for all batches"),
        ([of(A, A), of(A, B)], "no batch has |g_B - ∇F|² ="),
    ],
)
def test_numbers_of_batches_that_are_drawn_anew(more: list[float], words: str) -> None:
    parameters = {"n": ROWS, "batch_size": SIZE, "num_batches": COUNT}
    found = said(judges.drawn_anew, Case("", 1, parameters), [MINE], [{"more": more}])
    expect_said(found, words)


def test_a_number_that_nothing_gives_gets_no_hint() -> None:
    parameters = {"n": ROWS, "batch_size": SIZE, "num_batches": COUNT}
    found = said(judges.drawn_anew, Case("", 1, parameters), [MINE], [{"more": [3 * max(PAIRS)]}])
    assert found.endswith(" | ")
