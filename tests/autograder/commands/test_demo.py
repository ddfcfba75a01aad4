"""The demonstration, end to end: nbgrader's own steps, our passes, scores and feedback."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest

from autograder.commands import demo as demo_module
from autograder.commands.demo import ASSIGNMENT, Result, demo
from tests.helpers.course_folders import ROOT, copy_assignment, needs_sources
from tests.helpers.whole_class import TASKS, leave_little

pytestmark = [
    needs_sources,
    pytest.mark.filterwarnings("ignore"),  # nbgrader's, and what it stands on
]
SCORES = {"right-differently": 5, "deadlock": 2, "untouched": 0}
"""Three of its six submissions; the class of `whole_class` has the others."""


@pytest.fixture(scope="module")
def course(tmp_path_factory: Any) -> Path:
    """A course folder with a space in its path, as small as nbgrader allows."""
    root = tmp_path_factory.mktemp("a course")
    leave_little(copy_assignment(ASSIGNMENT, root), TASKS)
    shutil.copy(ROOT / "nbgrader_config.py", root)
    for folder in (root, *root.parents[:2]):
        folder.chmod(folder.stat().st_mode | 0o055)
    return root


@pytest.fixture(scope="module")
def results(course: Path) -> dict[str, Result]:
    """Run the demonstration with some of its submissions."""
    lines: list[str] = []
    make = demo_module.make_submissions

    def some(source: Path, released: Path) -> dict[str, nbformat.NotebookNode]:
        submissions = make(source, released)
        assert len(submissions) == 6
        return {name: submissions[name] for name in SCORES}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_module, "make_submissions", some)
        rows = demo(course, say=lines.append)
    assert sum(line.startswith("grading ") for line in lines) == len(SCORES)
    return {row.submission: row for row in rows}


def test_the_scores_are_right(results: dict[str, Result]) -> None:
    assert {name: row.score for name, row in results.items()} == SCORES
    assert {row.max_score for row in results.values()} == {5}


def test_every_lost_point_has_its_reason(results: dict[str, Result]) -> None:
    assert results["right-differently"].reason == ""
    deadlock = results["deadlock"].reason
    assert "Rank 0 waits in recv from rank 1" in deadlock
    assert "Rank 1 waits in recv from rank 0" in deadlock
    assert "NotImplementedError" in results["untouched"].reason
