"""Wrong solutions of each assignment are found in its sandbox too.

Those that only this place finds, and one of each task: `tests/test_assignments.py` has all others.
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
from tests.helpers import solutions
from tests.helpers.course_folders import SOURCES, assignments, needs_sources

pytestmark = needs_sources


def chosen(folder: Path) -> Iterator[Solution]:
    tasks: set[str] = set()
    for mutant in solutions.mutants_in(folder):
        here_alone = tuple(mutant.where) == ("grader",)
        if here_alone or ("grader" in mutant.where and mutant.reason and mutant.task not in tasks):
            tasks.add(mutant.task)
            yield mutant


CASES = [
    pytest.param(
        *(folder, mutant),
        id=f"{folder.name}-{mutant.task}__{mutant.mistake}",
        marks=() if folder.name.startswith("01") else pytest.mark.large,
    )
    for folder in assignments(SOURCES)
    for mutant in chosen(folder)
]


@pytest.fixture(scope="module")
def graded(request: pytest.FixtureRequest) -> Iterator[tuple[Path, Sandbox]]:
    folder: Path = request.param
    with Sandbox(masked_from(solutions.hidden_of(folder).MASKED)) as place:
        yield folder, place


@pytest.mark.every_case
@pytest.mark.parametrize(("graded", "mutant"), CASES, indirect=["graded"], scope="module")
def test_mutant(graded: tuple[Path, Sandbox], mutant: Solution) -> None:
    folder, place = graded
    check, name = solutions.checks_of(folder)[mutant.task], f"{folder.name}/{mutant.task}"
    with Submission(place) as submission:
        assert not submission.run_cell(next(solutions.code_cells(folder)).source).error
        assert not submission.run_cell(mutant.source).error
        for hidden in ((), solutions.hidden_cases(folder, mutant.task)):
            examined = examine(name, check, submission, seed="tests", hidden=hidden)
            if says(examined, mutant.reason or ""):
                break
    assert not notes_on(examined)
    assert not examined.passed, f"{mutant.mistake} got through"
    assert says(examined, mutant.reason or ""), str(examined)
