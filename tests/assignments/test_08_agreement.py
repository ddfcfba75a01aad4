"""The reports on wrong mixing weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from course_lib.checking import Case
from course_lib.checking.local import load_module
from tests.helpers.course_folders import RELEASED
from tests.helpers.findings import expect_said, said

judges = load_module(RELEASED / "08_decentralized_training" / "judges.py")

PATH = {"world_size": 3, "links": [(0, 1), (1, 2)]}
"""Three ranks; the middle one has two neighbours, so every link weighs a third."""
THIRD = 1 / 3
METROPOLIS = [[2 * THIRD, THIRD, 0.0], [THIRD, THIRD, THIRD], [0.0, THIRD, 2 * THIRD]]


def metropolis(*changes: tuple[int, int, float]) -> Tensor:
    weights = torch.tensor(METROPOLIS, dtype=torch.float64)
    for i, j, value in changes:
        weights[i, j] = value
    return weights


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (metropolis(), ""),
        (METROPOLIS, "expected a float64 tensor of shape [3, 3]"),
        (torch.eye(2, dtype=torch.float64), "expected a float64 tensor of shape [3, 3]"),
        (metropolis().float(), "the matrix has dtype torch.float32, expected torch.float64"),
        (metropolis((0, 2, 0.1)), "W[0, 2] is 0.1, expected 0, since ranks 0 and 2 are not linked"),
        (
            metropolis((0, 1, 0.5)),
            "W[0, 1] is 0.5, expected 1/3: rank 0 has 1 neighbour, rank 1 has 2",
        ),
        (metropolis((1, 1, 0.5)), "row 1 sums to 1.16667, expected 1"),
        (metropolis((2, 2, float("nan"))), "row 2 sums to nan, expected 1"),
    ],
)
def test_weights_of_links(answer: Any, words: str) -> None:
    expect_said(said(judges.weighs_each_link, Case("", 3, PATH), [None], [answer]), words)
