"""The check in a notebook and the grader say the same of the same function, case by case.

The words may differ in one thing: on which line of which cell or file something stands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autograder.examination.check import examine
from autograder.examination.submission import Submission
from autograder.passes.examine import masked_from
from autograder.sandbox.place import SandboxedPlace
from course_lib.checking import CheckReport, run_check
from course_lib.checking.mutants import Mutant
from course_lib.checking.runners import LocalRunner
from tests.helpers.course_folders import SOURCES, assignments, needs_sources
from tests.helpers.solutions import checks_of, code_cells, hidden_of, mutants_in, readable
from tests.helpers.tiers import tier

pytestmark = [pytest.mark.timeout(120)]

BY_DEFAULT = ("02_data_parallel_sgd", "05_bucketing_and_overlap")
"""Values; hooks, handles and time."""
SIMULATED_AND_GRADED = {"simulated", "grader"}


def is_sampled(folder: Path, number: int) -> bool:
    return folder.name in BY_DEFAULT and number % 6 == 0


CASES = [
    pytest.param(
        *(folder, mutant),
        id=f"{folder.name}-{mutant.task}__{mutant.mistake}",
        marks=tier(is_sampled(folder, number)),
    )
    for folder in readable(assignments(SOURCES))
    for number, mutant in enumerate(mutants_in(folder))
    if set(mutant.where) >= SIMULATED_AND_GRADED
]


@pytest.fixture(scope="module")
def graded(request: pytest.FixtureRequest) -> Iterator[tuple[Path, SandboxedPlace]]:
    folder: Path = request.param
    with SandboxedPlace(masked_from(hidden_of(folder).MASKED)) as place:
        yield folder, place


def without_places(text: str) -> str:
    """Return a reason without what names a line."""
    text = re.sub(r"\s*\([^()]*, line \d+\)", "", text)
    text = re.sub(r"\S*(<[^<>]*>|\w+\.py|Cell In\[\d+\]), line \d+", "line", text)
    return re.sub(r"File .*?, line \d+", "line", text)


def told(report: CheckReport) -> list[tuple[Any, ...]]:
    """Return what a report says, case by case."""
    return [
        (result.name, result.passed, dict(result.parts), without_places(result.reason))
        for result in report.results
    ]


@needs_sources
@pytest.mark.parametrize(("graded", "mutant"), CASES, indirect=["graded"], scope="module")
def test_of_a_solution(graded: tuple[Path, SandboxedPlace], mutant: Mutant) -> None:
    folder, place = graded
    name, check = f"{folder.name}/{mutant.task}", checks_of(folder)[mutant.task]
    with Submission(place) as submission:
        assert not submission.run_cell(next(code_cells(folder)).source).error
        assert not submission.run_cell(mutant.source).error
        ours = examine(name, check, submission, seed="same").report
    with LocalRunner(mutant.function, quiet=True) as run:
        theirs = run_check(name, check, run, seed="same")
    assert told(ours) == told(theirs)
