"""In the sandbox, a released notebook gets no points and the solution gets all of them."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from autograder.examination.check import examine
from autograder.examination.submission import Submission
from autograder.passes.examine import masked_from
from autograder.sandbox.place import SandboxedPlace
from course_lib.checking.local import load_checks, load_module
from course_lib.learner.notebooks import EXPLORE
from tests.helpers.course_folders import RELEASED, SOURCES, assignments, needs_sources
from tests.helpers.tiers import tier

pytestmark = needs_sources

ASSIGNMENTS = [
    pytest.param(folder, id=folder.name, marks=tier(folder.name == "02_data_parallel_sgd"))
    for folder in assignments(SOURCES)
]


def points(notebook: Path, source: Path) -> tuple[float, float]:
    """Run the notebook's cells and checks in a sandbox; return the points and how many there are.

    Cells to play with are not run, as in the grader.
    """
    checks = load_checks(RELEASED / source.name / "checks.py")
    hidden = load_module(source / "hidden.py", RELEASED / source.name)
    earned = most = 0.0
    with (
        SandboxedPlace(masked_from(hidden.MASKED)) as place,
        Submission(place) as submission,
    ):
        for cell in nbformat.read(notebook, as_version=4).cells:
            if cell.cell_type != "code" or EXPLORE in cell.metadata.get("tags", ()):
                continue
            role = cell.metadata.get("nbgrader", {})
            if not role.get("grade"):
                outcome = submission.run_cell(cell.source)
                # A script to mend is shown whole, above a stub that raises in the same cell.
                is_stub = "raise NotImplementedError" in cell.source
                assert not outcome.error or is_stub, outcome
                continue
            task = role["grade_id"]
            name = f"{source.name}/{task}"
            examined = examine(
                name, checks[task], submission, seed="tests", hidden=hidden.HIDDEN[task]
            )
            earned += role["points"] * examined.report.fraction
            most += role["points"]
    return earned, most


@pytest.mark.parametrize("folder", ASSIGNMENTS)
def test_the_released_stubs_get_no_points(folder: Path) -> None:
    earned, most = points(RELEASED / folder.name / f"{folder.name}.ipynb", folder)
    assert earned == 0 < most


@pytest.mark.parametrize("folder", ASSIGNMENTS)
def test_the_solution_gets_all_points(folder: Path) -> None:
    earned, most = points(folder / f"{folder.name}.ipynb", folder)
    assert earned == most > 0
