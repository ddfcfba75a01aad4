"""The same submission gets the same score, in spite of chance and a busy machine."""

from __future__ import annotations

import subprocess
import sys

import pytest

from autograder.sandbox.place import SandboxedPlace
from tests.autograder.examination.test_attacks import AVERAGE, Attack, graded, honest
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


@pytest.mark.large
@pytest.mark.timeout(3600)
def test_fifty_gradings_on_busy_cores_are_all_full(assignment_place: SandboxedPlace) -> None:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        for number in range(50):
            verdict, _, _ = graded(assignment_place, honest(), seed=f"seed {number}")
            assert verdict.score == verdict.max_score, (number, verdict.reason)
            assert not verdict.notes
    finally:
        for process in busy:
            process.kill()
            process.wait()
