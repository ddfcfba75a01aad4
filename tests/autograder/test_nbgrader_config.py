"""Plain nbgrader commands in a fresh checkout: they work at once, and write into grading/ only."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.helpers.course_folders import ROOT, copy_assignment, needs_sources

ASSIGNMENT = "02_data_parallel_sgd"
BARE_PATH = os.pathsep.join(["/usr/bin", "/bin"])  # as where no environment is activated

pytestmark = needs_sources


def nbgrader(course: Path, *arguments: str) -> None:
    """Run nbgrader's own program, by its path."""
    program = Path(sysconfig.get_path("scripts")) / "nbgrader"
    process = subprocess.run(
        [program, *arguments],
        cwd=course,
        env={**os.environ, "PATH": BARE_PATH},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr


@pytest.mark.large
def test_the_first_command_makes_the_gradebook_and_the_export_lies_beside_it(tmp_path) -> None:
    course = tmp_path / "a course"
    copy_assignment(ASSIGNMENT, course)
    shutil.copy(ROOT / "nbgrader_config.py", course)
    before = {*course.rglob("*")}
    nbgrader(course, "generate_assignment", ASSIGNMENT)
    nbgrader(course, "export")
    created = {*course.rglob("*")} - before
    grading = course / "grading"
    assert {grading / "gradebook.db", grading / "grades.csv"} <= created
    assert [path for path in created if not path.is_relative_to(grading)] == []
