"""Every wrong solution of an assignment is found in the sandbox too, and every right one passes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

from autograder.examination.check import examine
from autograder.examination.submission import Submission
from autograder.passes.examine import masked_from
from autograder.sandbox.place import SandboxedPlace
from course_lib.checking.local import load_checks, load_module
from course_lib.checking.mutants import Mutant, mutants_of
from tests.helpers.course_folders import SOURCES, assignments, needs_sources

pytestmark = [pytest.mark.timeout(120), needs_sources]

ASSIGNMENTS = assignments(SOURCES)
MUTANTS = [
    (folder, mutant)
    for folder in ASSIGNMENTS
    for mutant in mutants_of(load_module(folder / "mutants.py"))
    if "grader" in mutant.where
]
EVERY = 18
"""Of so many mutants one runs by default, ``make test-all`` runs all; with those for here alone."""
CASES = [
    pytest.param(
        *(folder, mutant),
        id=f"{mutant.task}__{mutant.mistake}",
        marks=() if number % EVERY == 0 or len(mutant.where) == 1 else pytest.mark.large,
    )
    for number, (folder, mutant) in enumerate(MUTANTS)
]


@pytest.fixture(scope="module")
def graded(request: pytest.FixtureRequest) -> Iterator[tuple[Path, SandboxedPlace]]:
    folder: Path = request.param
    masked = masked_from(load_module(folder / "hidden.py").MASKED)
    with SandboxedPlace(masked) as place:
        yield folder, place


def setup_cell(folder: Path) -> str:
    notebook = nbformat.read(folder / f"{folder.name}.ipynb", as_version=4)
    return next(cell.source for cell in notebook.cells if cell.cell_type == "code")


@pytest.mark.parametrize(
    ("graded", "mutant"),
    CASES,
    indirect=["graded"],
    scope="module",
)
def test_mutant(graded: tuple[Path, SandboxedPlace], mutant: Mutant) -> None:
    folder, place = graded
    check = load_checks(folder / "checks.py")[mutant.task]
    hidden = load_module(folder / "hidden.py").HIDDEN[mutant.task]
    with Submission(place) as submission:
        assert not submission.run_cell(setup_cell(folder)).error
        assert not submission.run_cell(mutant.source).error
        examined = examine(
            f"{folder.name}/{mutant.task}", check, submission, seed="tests", hidden=hidden
        )
    assert examined.notes == []
    if mutant.reason is None:
        assert examined.report.passed, str(examined.report)
    else:
        assert not examined.report.passed, f"{mutant.mistake} got through"
        assert mutant.reason in " ".join(str(examined.report).split()), str(examined.report)
