"""A new assignment is complete: it passes its tests and is released before anything is changed."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from autograder.__main__ import main
from autograder.commands.new import new
from autograder.course import handed_out
from autograder.errors import CommandFailed
from course_lib.checking import run_check
from course_lib.checking.local import LocalRunner
from course_lib.checking.mutants import says
from course_lib.ranks import Ranks
from tests.helpers.course_folders import ROOT, SOURCES, needs_sources
from tests.helpers.solutions import (
    checks_of,
    hidden_cases,
    is_masked,
    module_of_reference,
    mutants_in,
    solution_of,
)

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
    folder = new(course, NAME)
    assert set(checks_of(folder)) == {"rotate"}
    hidden = hidden_cases(folder, "rotate")
    assert len(hidden) > 4
    right = [solution_of(folder, "rotate")]
    mistakes = []
    for mutant in mutants_in(folder):
        if "simulated" not in mutant.where:
            continue
        if mutant.reason is None:
            right.append(mutant.function)
        else:
            mistakes.append((mutant.function, mutant.reason))
    assert len(right) > 1
    assert len(mistakes) > 4
    pool: dict[int, Ranks] = {}
    try:
        for function, reason in [*((function, None) for function in right), *mistakes]:
            with LocalRunner(function, "simulated", echo=None, ranks=pool) as runner:
                report = run_check(
                    *(f"{NAME}/rotate", checks_of(folder)["rotate"], runner),
                    seed="tests",
                    hidden=hidden if reason is None else (),  # public cases find every mistake
                )
            assert report.passed == (reason is None), str(report)
            assert reason is None or says(report, reason), str(report)
    finally:
        for ranks in pool.values():
            ranks.close()


def test_the_guide_explains_its_check(course: Path) -> None:
    checks = (handed_out(new(course, NAME)) / "checks.py").read_text()
    code = checks[checks.index("from collections") :]
    assert f"```python\n{code}```" in (SOURCES / "README.md").read_text()


def test_its_reference_cannot_be_imported_while_it_is_graded(course: Path) -> None:
    folder = new(course, NAME)
    module = module_of_reference(folder, "rotate")
    assert module and is_masked(folder, module)


def test_it_writes_over_nothing_and_wants_a_name_that_sorts(
    course: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = handed_out(new(course, NAME)) / "checks.py"
    checks.write_text("mine")
    monkeypatch.chdir(course)
    for name, message in ((NAME, "exists already"), ("topic", "use a name like 12_my_topic")):
        monkeypatch.setattr(sys, "argv", ["autograder", "new", name])
        assert main() == 2
        assert message in capsys.readouterr().err
    assert checks.read_text() == "mine"
    shutil.rmtree(course / "instructor" / NAME)
    with pytest.raises(CommandFailed, match=f"assignments/{NAME} exists already"):
        new(course, NAME)
