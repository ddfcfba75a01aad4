"""A new assignment is complete: it passes its tests and is released before anything is changed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from autograder.commands.new import new
from autograder.course import handed_out
from autograder.errors import CommandFailed
from course_lib.checking import run_check
from course_lib.checking.local import LocalRunner
from course_lib.checking.mutants import report_on, says
from tests.helpers import solutions
from tests.helpers.course_folders import ROOT, SOURCES, needs_sources

NAME = "12_my_topic"

pytestmark = [
    needs_sources,
    # nbgrader and what it stands on, not we
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::PendingDeprecationWarning"),
]


@pytest.fixture
def course(tmp_path: Path) -> Path:
    """Return a course without assignments."""
    (tmp_path / "instructor").mkdir()
    (tmp_path / "assignments").mkdir()
    shutil.copy(SOURCES / "README.md", tmp_path / "instructor")
    shutil.copy(ROOT / "nbgrader_config.py", tmp_path)
    return tmp_path


@pytest.mark.large
def test_its_solution_passes_and_every_wrong_one_fails_for_its_reason(course: Path) -> None:
    folder, name = new(course, NAME), f"{NAME}/rotate"
    assert set(solutions.checks_of(folder)) == {"rotate"}
    check = solutions.checks_of(folder)["rotate"]
    hidden = check.hidden("tests")
    assert len(hidden) > 4
    with LocalRunner(solutions.solution_of(folder, "rotate"), "simulated", echo=None) as runner:
        assert run_check(name, check, runner, seed="tests", hidden=hidden).passed
    mutants = [mutant for mutant in solutions.mutants_in(folder) if "simulated" in mutant.where]
    assert len(mutants) > 5 and not all(mutant.reason for mutant in mutants)
    for mutant in mutants:  # public cases find every mistake
        report = report_on(name, check, mutant, None if mutant.reason else "tests")
        assert report.passed == (mutant.reason is None), str(report)
        assert mutant.reason is None or says(report, mutant.reason), str(report)


def test_the_guide_explains_its_check(course: Path) -> None:
    checks = (handed_out(new(course, NAME)) / "checks.py").read_text()
    code = checks[checks.index("from collections") :]
    assert f"```python\n{code}```" in (SOURCES / "README.md").read_text()


def test_its_reference_cannot_be_imported_while_it_is_graded(course: Path) -> None:
    folder = new(course, NAME)
    module = solutions.module_of_reference(folder, "rotate")
    assert module and solutions.is_masked(folder, module)


def test_it_writes_over_nothing_and_wants_a_name_that_sorts(course: Path, autograder: Any) -> None:
    checks = handed_out(new(course, NAME)) / "checks.py"
    checks.write_text("mine")
    for name, message in ((NAME, "exists already"), ("topic", "use a name like 12_my_topic")):
        status, output = autograder(course, "new", name)
        assert status == 2 and message in output
    assert checks.read_text() == "mine"
    shutil.rmtree(course / "instructor" / NAME)
    with pytest.raises(CommandFailed, match=f"assignments/{NAME} exists already"):
        new(course, NAME)
