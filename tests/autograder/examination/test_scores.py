"""The same submission gets the same score, in spite of chance and a busy machine."""

from __future__ import annotations

import pytest

from autograder.sandbox.place import SandboxedPlace
from tests.autograder.examination.test_attacks import AVERAGE, Attack, graded
from tests.helpers.course_folders import needs_sources

pytestmark = needs_sources

ROUNDED = Attack(
    frozenset(),
    tasks={
        "average_gradients": AVERAGE
        + "            param.grad.copy_(param.grad.round(decimals=3))\n"
    },
)
"""Right only to the third decimal."""


@pytest.mark.large
def test_right_on_the_third_decimal_only_is_always_the_same_score(
    assignment_place: SandboxedPlace,
) -> None:
    scores = set()
    for seed in range(6):
        verdict, _, _ = graded(assignment_place, ROUNDED, seed=f"seed {seed}")
        scores.add(tuple(check.score for check in verdict.checks))
    assert scores == {(3.0, 0.0, 5.0)}
