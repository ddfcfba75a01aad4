"""Every wrong solution of an assignment is found in the sandbox too, and every right one passes.

`make test` tries those that only this place finds: `test_same_verdict.py` shows with a sample of
the others that the grader says what a check in a notebook says.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from autograder.examination.submission import Submission, examine
from autograder.examination.verdict import notes_on
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


def setup_cell(folder: Path) -> str:
    source: str = next(code_cells(folder)).source
    return source


@pytest.mark.parametrize(("folder", "mutant"), CASES)
def test_mutant(place: Sandbox, folder: Path, mutant: Solution) -> None:
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
