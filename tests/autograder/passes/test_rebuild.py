"""Every damaged notebook is graded by nbgrader, with this pass before its own."""

import copy
import logging
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbconvert.exporters.exporter import ResourcesDict
from nbformat import NotebookNode, v4
from nbgrader.api import Gradebook
from nbgrader.converters import Autograde, GenerateAssignment
from nbgrader.converters.base import NbGraderException
from nbgrader.coursedir import CourseDirectory
from nbgrader.preprocessors import NbGraderPreprocessor
from nbgrader.utils import is_grade
from traitlets.config import Config

from tests.helpers.small_assignment import POINTS, RIGHT, TEST, WRONG, notebook


class RunAll(NbGraderPreprocessor):  # type: ignore[misc, unused-ignore]
    """Stand in for the pass that grades: run every cell here, and record the errors."""

    def preprocess(
        self, nb: NotebookNode, resources: ResourcesDict
    ) -> tuple[NotebookNode, ResourcesDict]:
        namespace: dict[str, Any] = {}
        for cell in nb.cells:
            if cell.cell_type != "code" or "skip-execution" in cell.metadata.get("tags", ()):
                continue
            try:
                exec(cell.source, namespace)
            except Exception as error:
                name = type(error).__name__
                cell.outputs = [v4.new_output("error", ename=name, evalue="", traceback=[])]
        return nb, resources


# nbgrader adds a submission to its tables in an order that SQLAlchemy warns of.
graded_by_nbgrader = pytest.mark.filterwarnings(
    "ignore:Object of type <(Submitted|Grade|Comment).*not in session:sqlalchemy.exc.SAWarning"
)
Course = tuple[CourseDirectory, Config]


def course_in(folder: Path) -> Course:
    """Return a course whose assignment is ``ps``."""
    config = Config()
    config.CourseDirectory.root = str(folder)
    config.CourseDirectory.course_id = "course"
    config.CourseDirectory.db_url = f"sqlite:///{folder / 'gradebook.db'}"
    nbgraders = "nbgrader.preprocessors"
    config.Autograde.sanitize_preprocessors = [
        "autograder.passes.rebuild.Rebuild",
        *(f"{nbgraders}.{name}" for name in ("ClearOutput", "DeduplicateIds")),
        *(f"{nbgraders}.{name}" for name in ("OverwriteKernelspec", "OverwriteCells")),
        f"{nbgraders}.CheckCellMetadata",
    ]
    config.Autograde.autograde_preprocessors = [
        RunAll,
        f"{nbgraders}.SaveAutoGrades",
        f"{nbgraders}.CheckCellMetadata",
    ]
    coursedir = CourseDirectory(config=config)
    coursedir.assignment_id = "ps"
    return coursedir, config


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a course with one released assignment, with a hidden test."""
    folder = tmp_path_factory.mktemp("released")
    source = folder / "source" / "ps" / "hw.ipynb"
    source.parent.mkdir(parents=True)
    hidden = "\n### BEGIN HIDDEN TESTS\nassert double(21) == 42\n### END HIDDEN TESTS"
    solution = "def double(x):\n    ### BEGIN SOLUTION\n    return 2 * x\n    ### END SOLUTION"
    nbformat.write(notebook(solution, TEST + hidden), source)
    coursedir, config = course_in(folder)
    with pytest.MonkeyPatch.context() as patch:
        # nbgrader runs the alembic that is installed with it.
        patch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        GenerateAssignment(coursedir=coursedir, config=config).start()
    return folder


@pytest.fixture
def course(released: Path, tmp_path: Path) -> Course:
    """Return a course of the test's own, in which the assignment was released."""
    return course_in(shutil.copytree(released, tmp_path / "course"))


def hand_in(course: Course, student: str, nb: NotebookNode) -> None:
    path = Path(course[0].root, "submitted", student, "ps", "hw.ipynb")
    path.parent.mkdir(parents=True)
    path.write_text(v4.writes_json(nb))


def scores(course: Course) -> dict[str, tuple[float | None, bool]]:
    """Return each student's points for the test, and whether the written answer awaits a reader."""
    found = {}
    with Gradebook(course[0].db_url, "course") as gradebook:
        for submission in gradebook.assignment_submissions("ps"):
            grades = {grade.name: grade for grade in submission.notebooks[0].grades}
            assert grades["test"].needs_manual_grade is False
            found[submission.student.id] = (
                grades["test"].auto_score,
                grades["why"].needs_manual_grade,
            )
    return found


def start_from(course: Course) -> NotebookNode:
    path = Path(course[0].root, "release", "ps", "hw.ipynb")
    nb: NotebookNode = nbformat.read(path, as_version=4)
    return nb


def _duplicate(index: int) -> Callable[[NotebookNode], None]:
    def change(nb: NotebookNode) -> None:
        second = copy.deepcopy(nb.cells[index])
        second.id = "pasted"
        nb.cells.insert(index + 1, second)

    return change


def _flip(nb: NotebookNode) -> None:
    nb.cells[3].metadata.nbgrader.update(grade=False, solution=True, locked=False)
    nb.cells[3].source = "pass"


def _strip_and_renumber(nb: NotebookNode) -> None:
    for number, cell in enumerate(nb.cells):
        cell.metadata, cell.id = {}, f"new-{number}"


def _damage(nb: NotebookNode) -> None:
    nb.cells[0].metadata.nbgrader = {"schema_version": "0", "grade_id": ["list"]}
    nb.cells[3].metadata.nbgrader = {"schema_version": 99}
    nb.cells[5].metadata.nbgrader = "text"


CHANGES: dict[str, tuple[Callable[[NotebookNode], Any], bool]] = {
    "nothing": (lambda nb: None, True),
    "test duplicated": (_duplicate(3), True),
    "test flipped": (_flip, True),
    "points raised": (lambda nb: nb.cells[3].metadata.nbgrader.update(points=1e9), True),
    "solution deleted": (lambda nb: nb.cells.pop(2), False),
    "metadata and ids lost": (_strip_and_renumber, True),
    "metadata damaged": (_damage, True),
    "all cells deleted": (lambda nb: nb.cells.clear(), False),
}


QUICK = {"test duplicated", "test flipped", "solution deleted", "metadata damaged"}


@graded_by_nbgrader
@pytest.mark.parametrize(
    "names", [QUICK, pytest.param(CHANGES.keys() - QUICK, marks=pytest.mark.large)]
)
def test_damaged_notebooks_are_graded_in_a_real_course(course: Course, names: set[str]) -> None:
    """Each change is submitted with the right answer, and again with a wrong one."""
    expected = {}
    for name in sorted(names):
        change, counts = CHANGES[name]
        for code, points in [(RIGHT, POINTS if counts else 0.0), (WRONG, 0.0)]:
            nb = start_from(course)
            nb.cells[2].source, nb.cells[4].source = code, "Because"
            change(nb)
            student = f"{name} {'right' if code == RIGHT else 'wrong'}".replace(" ", "_")
            hand_in(course, student, nb)
            expected[student] = points
    Autograde(coursedir=course[0], config=course[1]).start()
    found = scores(course)
    assert {student: points for student, (points, _) in found.items()} == expected
    for student, (_, waits) in found.items():
        path = Path(course[0].root, "autograded", student, "ps", "hw.ipynb")
        graded = nbformat.read(path, as_version=4)
        names = [cell.metadata.nbgrader.grade_id for cell in graded.cells if is_grade(cell)]
        assert sorted(names) == ["test", "why"]
        answer = next(cell.source for cell in graded.cells if cell.id == "why")
        stub = start_from(course).cells[4].source
        if student.startswith("metadata_and_ids_lost"):
            assert answer.startswith(f"{stub}\n\n*The student left") and waits
        else:
            kept = not student.startswith("all_cells_deleted")
            assert (answer, waits) == (("Because", True) if kept else (stub, False))


@graded_by_nbgrader
def test_an_assignment_without_a_release_is_an_error_and_not_a_zero(
    course: Course, caplog: pytest.LogCaptureFixture
) -> None:
    released = Path(course[0].root, "release", "ps", "hw.ipynb")
    hand_in(course, "ada", start_from(course))
    released.unlink()
    converter = Autograde(coursedir=course[0], config=course[1])
    logger = logging.getLogger("test")
    converter.log = logger
    with caplog.at_level(logging.ERROR), pytest.raises(NbGraderException):
        converter.start()
    assert "run nbgrader generate_assignment ps" in caplog.text
    assert not Path(course[0].root, "autograded", "ada", "ps").exists()
