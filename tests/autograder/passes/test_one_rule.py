"""`course check` and the grader give the same points for whatever an editor or a student did."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat import NotebookNode, v4

from autograder.collection.repair import vet
from autograder.course import Folders, Settings
from autograder.passes.examine import Exam, blank_verdict, examine_notebook, rebuilt
from course_lib.learner import _course, what_counts
from course_lib.learner.check import check_notebook
from tests.helpers.course_folders import RELEASED, needs_sources
from tests.helpers.whole_class import ASSIGNMENT, FILE, TASKS, notebook_of

pytestmark = [needs_sources, pytest.mark.filterwarnings("ignore")]
Change = Callable[[NotebookNode], Any]
BOUNDS, AVERAGE = TASKS
ALL = frozenset(TASKS)


@pytest.fixture(scope="module")
def course(released_course: Path, copy_of: Callable[[Path], Path]) -> Path:
    """A course with few cases; the desk beside it has the same checks."""
    root = copy_of(released_course)
    shutil.copytree(root / "assignments" / ASSIGNMENT, root / "desk" / ASSIGNMENT)
    return root


def by_check(course: Path, notebook: NotebookNode) -> dict[str, float]:
    path = course / "desk" / ASSIGNMENT / FILE
    nbformat.write(notebook, path)
    tasks = [task for task in _course.tasks(course, ASSIGNMENT) if task.checked]
    outcomes, _ = check_notebook(course, ASSIGNMENT, path)
    return {task.name: task.points * outcomes[task.name]["fraction"] for task in tasks}


def by_grader(course: Path, notebook: NotebookNode) -> dict[str, float]:
    folders = Folders.at(course)
    path = folders.submitted / "ada" / ASSIGNMENT / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, path)
    vet(ASSIGNMENT, "ada", [str(path)])
    nb = rebuilt(folders, path)
    verdict = blank_verdict(nb, folders, path, Settings())
    exam = Exam.of(folders.source / ASSIGNMENT)
    examine_notebook(nb, exam, verdict)
    return {check.task: check.score for check in verdict.checks}


# What was done to the solved notebook ------------------------------------------------------------
# Moved, edited and lost cells: `tests/course_lib/learner/test_what_counts.py`, for both.


def at(nb: NotebookNode, grade_id: str) -> int:
    return [what_counts.grade_id(cell) for cell in nb.cells].index(grade_id)


def stub(task: str) -> str:
    released = nbformat.read(RELEASED / ASSIGNMENT / FILE, as_version=4)
    return str(released.cells[at(released, f"write_{task}")].source)


def all_in_one(nb: NotebookNode) -> None:
    places = [at(nb, f"write_{task}") for task in TASKS]
    nb.cells[places[0]].source = "\n\n\n".join(nb.cells[p].source for p in places)
    for place, task in [*zip(places, TASKS, strict=True)][1:]:
        nb.cells[place].source = stub(task)


def magics_and_all_in_one(nb: NotebookNode) -> None:
    magics = "%matplotlib widget\n%no_such_magic\n%config InlineBackend.x = 1\nSOLUTION"
    in_the_cell(magics)(nb)
    all_in_one(nb)


def in_front(source: str) -> Change:
    return lambda nb: nb.cells.insert(at(nb, f"write_{AVERAGE}"), v4.new_code_cell(source))


def in_the_cell(source: str) -> Change:
    def change(nb: NotebookNode) -> None:
        cell = nb.cells[at(nb, f"write_{AVERAGE}")]
        cell.source = source.replace("SOLUTION", cell.source)

    return change


def helper_in_a_cell_to_explore(nb: NotebookNode) -> None:
    explored = next(c for c in nb.cells if c.metadata.get("tags") == ["explore"])
    cell = nb.cells[at(nb, f"write_{AVERAGE}")]
    explored.source, cell.source = cell.source, stub(AVERAGE)


CHANGES: dict[str, tuple[Change, frozenset[str]]] = {
    "magics of a kernel; all in one, stubs left": (magics_and_all_in_one, ALL),
    "an own cell raises": (in_front("1 / 0"), ALL),
    "input": (in_the_cell("SOLUTION\ninput('go on?')"), ALL),
    "sys.exit": (in_the_cell("SOLUTION\nimport sys; sys.exit(3)"), ALL),
    "a file beside": (in_the_cell("import beside_the_notebook\nSOLUTION"), ALL - {AVERAGE}),
    "solution in a cell to explore": (helper_in_a_cell_to_explore, ALL - {AVERAGE}),
}
QUICK = {"magics of a kernel; all in one, stubs left"}


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.large) for n in CHANGES]
)
def test_both_give_the_same_points(course: Path, name: str) -> None:
    change, full = CHANGES[name]
    notebook = notebook_of(course)
    (course / "desk" / ASSIGNMENT / "beside_the_notebook.py").touch()
    change(notebook)
    checked, graded = by_check(course, notebook), by_grader(course, notebook)
    assert checked == graded
    assert {task for task, points in graded.items() if points == TASKS[task]} == full
