"""Every wrong solution of an assignment is found in the sandbox too, and every right one passes.

`make test` tries those that only this place finds: `test_same_verdict.py` shows with a sample of
the others that the grader says what a check in a notebook says.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from autograder.examination.submission import Submission, examine
from autograder.examination.verdict import notes_on
from autograder.passes.examine import masked_from
from autograder.sandbox.sandbox import Sandbox
from course_lib.checking.mutants import Solution, says
from tests.helpers.course_folders import SOURCES, assignments, needs_sources
from tests.helpers.solutions import checks_of, code_cells, hidden_of, mutants_in, readable

pytestmark = needs_sources

ASSIGNMENTS = readable(assignments(SOURCES))


CASES = [
    pytest.param(
        *(folder, mutant),
        id=f"{folder.name}-{mutant.task}__{mutant.mistake}",
    )
    for folder in ASSIGNMENTS
    for mutant in mutants_in(folder)
    if "grader" in mutant.where
]


@pytest.fixture(scope="module")
def graded(request: pytest.FixtureRequest) -> Iterator[tuple[Path, Sandbox]]:
    folder: Path = request.param
    masked = masked_from(hidden_of(folder).MASKED)
    with Sandbox(masked) as place:
        yield folder, place


def setup_cell(folder: Path) -> str:
    source: str = next(code_cells(folder)).source
    return source


@pytest.mark.parametrize(
    ("graded", "mutant"),
    CASES,
    indirect=["graded"],
    scope="module",
)
def test_mutant(graded: tuple[Path, Sandbox], mutant: Solution) -> None:
    folder, place = graded
    check, hidden = checks_of(folder)[mutant.task], hidden_of(folder).HIDDEN[mutant.task]
    with Submission(place) as submission:
        assert not submission.run_cell(setup_cell(folder)).error
        assert not submission.run_cell(mutant.source).error
        examined = examine(
            f"{folder.name}/{mutant.task}", check, submission, seed="tests", hidden=hidden
        )
    assert not notes_on(examined)
    if mutant.reason is None:
        assert examined.passed, str(examined)
    else:
        assert not examined.passed, f"{mutant.mistake} got through"
        assert says(examined, mutant.reason), str(examined)
