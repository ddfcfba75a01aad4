"""Any submission becomes the released notebook with the student's words in it."""

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
from hypothesis import given, settings
from hypothesis import strategies as st
from nbconvert.exporters.exporter import ResourcesDict
from nbformat import NotebookNode, v4
from nbgrader.api import Gradebook
from nbgrader.converters import Autograde, GenerateAssignment
from nbgrader.converters.base import NbGraderException
from nbgrader.coursedir import CourseDirectory
from nbgrader.nbgraderformat import MetadataValidator
from nbgrader.preprocessors import NbGraderPreprocessor
from nbgrader.utils import is_grade
from traitlets.config import Config

from autograder.passes import rebuild as module
from autograder.passes.rebuild import rebuild

POINTS = 3.0
STUB = "def double(x):\n    raise NotImplementedError"
RIGHT = "def double(x):\n    return 2 * x"
WRONG = "def double(x):\n    return x"
TEST = "assert double(two) == 4"


def tracked(grade_id: str, **kind: Any) -> dict[str, Any]:
    flags = {"grade": False, "solution": False, "locked": False, "task": False, "schema_version": 3}
    return {"nbgrader": {**flags, "grade_id": grade_id, **kind}}


def notebook(solution: str = STUB, test: str = TEST) -> NotebookNode:
    """Return an assignment, or with ``STUB`` its released version."""
    nb: NotebookNode = v4.new_notebook(
        metadata={"kernelspec": {"name": "python3", "display_name": "P", "language": "python"}},
        cells=[
            v4.new_markdown_cell("Welcome", id="intro", metadata=tracked("intro", locked=True)),
            v4.new_code_cell("two = 2", id="setup"),
            v4.new_code_cell(solution, id="write", metadata=tracked("write", solution=True)),
            v4.new_code_cell(
                test, id="test", metadata=tracked("test", grade=True, locked=True, points=POINTS)
            ),
            v4.new_markdown_cell(
                "Your answer",
                id="why",
                metadata=tracked("why", grade=True, solution=True, points=1),
            ),
            v4.new_markdown_cell("The end", id="end"),
        ],
    )
    return nb


def answered(code: str = RIGHT) -> NotebookNode:
    nb = notebook(code)
    nb.cells[4].source = "Because"
    return nb


def sources(nb: NotebookNode) -> list[str]:
    return [cell.source for cell in nb.cells]


def insert(nb: NotebookNode, index: int, *cells: NotebookNode) -> NotebookNode:
    nb.cells[index:index] = cells
    return nb


def test_answers_are_taken_over_and_nothing_else_is() -> None:
    submitted = answered()
    submitted.metadata = {"kernelspec": {"name": "evil"}, "extra": 1}
    for cell in submitted.cells:
        cell.metadata["tags"] = ["skip-execution"]
        cell.metadata["editable"] = True
    submitted.cells[0].source = "Edited instructions"
    submitted.cells[3].source = "print(2)"
    submitted.cells[3].outputs = [v4.new_output("execute_result", {"text/plain": "3"})]
    submitted.cells[4].attachments = {"a.png": {"image/png": "AAAA"}}
    released, before = notebook(), copy.deepcopy(submitted)
    rebuilt = rebuild(released, submitted)
    expected = notebook(RIGHT)
    expected.cells[4].source = "Because"
    assert rebuilt == expected
    assert submitted == before and released == notebook()


def test_an_untouched_notebook_is_the_released_one() -> None:
    assert rebuild(notebook(), notebook()) == notebook()


@pytest.mark.parametrize("at", range(7))
def test_added_cells_keep_their_place(at: int) -> None:
    added = [v4.new_code_cell("help = 1", id="help"), v4.new_markdown_cell("note", id="note")]
    added[0].metadata = tracked("mine", grade=True, solution=False, points=99)
    added[0].outputs = [v4.new_output("stream", text="noise")]
    added[1].attachments = {"a.png": {"image/png": "AAAA"}}
    rebuilt = rebuild(notebook(), insert(answered(), at, *copy.deepcopy(added)))
    assert sources(rebuilt) == sources(insert(answered(), at, *added))
    for cell in rebuilt.cells[at : at + 2]:
        assert cell.metadata == {} and "attachments" not in cell and not cell.get("outputs")
        assert cell.id not in ("help", "note")
    nbformat.validate(rebuilt)


def test_an_added_cell_stays_before_its_neighbour_when_others_go() -> None:
    submitted = insert(answered(), 3, v4.new_code_cell("def double(x): return 2 * x"))
    del submitted.cells[2]  # the solution cell
    rebuilt = rebuild(notebook(), submitted)
    assert sources(rebuilt)[2:5] == [STUB, "def double(x): return 2 * x", TEST]
    told = "the cell write is missing, so the released cell was graded"
    assert rebuilt.metadata["rebuild"] == [told]


def test_reordered_cells_are_put_in_the_released_order() -> None:
    submitted = answered()
    submitted.cells.reverse()
    assert rebuild(notebook(), submitted) == rebuild(notebook(), answered())


def test_of_two_copies_the_first_counts_and_the_second_goes() -> None:
    submitted = answered()
    second = copy.deepcopy(submitted.cells[2])
    second.id, second.source = "pasted", WRONG
    rebuilt = rebuild(notebook(), insert(submitted, 4, second))
    assert sources(rebuilt) == sources(answered())
    assert rebuilt.metadata["rebuild"] == ["cell 5 is another copy of write, so it was left out"]


@pytest.mark.parametrize("lost", ["metadata", "nbgrader", "grade_id"])
def test_a_solution_that_lost_its_name_is_known_by_its_cell_id(lost: str) -> None:
    submitted = answered()
    for cell in submitted.cells:
        if lost == "metadata":
            cell.metadata = {}
        elif lost == "nbgrader":
            cell.metadata.pop("nbgrader", None)
        elif "nbgrader" in cell.metadata:
            cell.metadata.nbgrader.grade_id += "_renamed"
    assert rebuild(notebook(), submitted) == rebuild(notebook(), answered())


def test_without_ids_and_names_the_words_are_kept_and_released_ones_not_repeated() -> None:
    submitted = answered()
    for cell in submitted.cells:
        cell.metadata = {}
        del cell["id"]
    submitted.nbformat_minor = 4
    rebuilt = rebuild(notebook(), submitted)
    assert sources(rebuilt) == [
        *("Welcome", "two = 2", STUB, RIGHT, TEST),
        *("Your answer", "Because", "The end"),
    ]
    nbformat.validate(rebuilt)


def test_equal_cells_are_told_apart_by_their_order() -> None:
    released = insert(notebook(), 6, v4.new_code_cell("two = 2", id="again"))
    submitted = copy.deepcopy(released)
    for cell in submitted.cells:
        del cell["id"]
    insert(submitted, 7, v4.new_code_cell("two = 2"))
    assert sources(rebuild(released, submitted)) == sources(submitted)


def test_new_ids_differ_from_released_ones() -> None:
    released = notebook()
    released.cells[5].id = "added-1"
    rebuilt = rebuild(released, insert(answered(), 0, v4.new_code_cell("help = 1")))
    assert [cell.id for cell in rebuilt.cells] == [
        *("added-2", "intro", "setup", "write", "test", "why", "added-1")
    ]


def test_a_released_cell_that_is_free_to_edit_is_taken_over_by_id() -> None:
    submitted = answered()
    submitted.cells[1].source = "two = 2\nimport math"
    assert sources(rebuild(notebook(), submitted)) == sources(submitted)
    submitted.cells[1] = v4.new_markdown_cell("two = 2", id="setup")
    rebuilt = rebuild(notebook(), submitted)  # as text it would not run
    assert [(c.cell_type, c.source) for c in rebuilt.cells[1:3]] == [
        ("code", "two = 2"),
        ("markdown", "two = 2"),
    ]


def test_a_cell_to_play_with_takes_what_was_tried_and_keeps_its_tag() -> None:
    released = insert(notebook(), 3, v4.new_code_cell("double(1)", id="explore"))
    released.cells[3].metadata = {"tags": ["explore"]}
    submitted = copy.deepcopy(released)
    submitted.cells[3].source = "double(7)"
    submitted.cells[3].metadata = {}
    rebuilt = rebuild(released, submitted)
    assert sources(rebuilt) == sources(submitted)
    assert rebuilt.cells[3].metadata == {"tags": ["explore"]}  # or the grader would run it
    del submitted.cells[3]
    assert rebuild(released, submitted) == released


def test_types_are_as_released() -> None:
    submitted = answered()
    submitted.cells[2] = v4.new_markdown_cell(RIGHT, id="write", metadata=tracked("write"))
    submitted.cells[4] = v4.new_code_cell("Because", id="why", metadata=tracked("why"))
    assert rebuild(notebook(), submitted) == rebuild(notebook(), answered())


@pytest.mark.parametrize("minor", [4, 5])
def test_ids_follow_the_released_format(minor: int) -> None:
    released = notebook()
    released.nbformat_minor = minor
    if minor == 4:
        for cell in released.cells:
            del cell["id"]
    submitted = insert(answered(), 0, v4.new_code_cell("a", id="intro"), v4.new_code_cell("b"))
    rebuilt = rebuild(released, submitted)
    assert sources(rebuilt)[:2] == ["a", "b"]
    assert all(("id" in cell) == (minor == 5) for cell in rebuilt.cells)
    nbformat.validate(rebuilt)


def test_what_is_too_much_is_left_out_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CELLS", 3)
    monkeypatch.setattr(module, "MAX_SOURCE", 100)
    monkeypatch.setattr(module, "MAX_TOTAL", 240)
    submitted = answered("x" * 101)
    insert(submitted, 6, *(v4.new_code_cell(f"n = {n}") for n in range(5)))
    rebuilt = rebuild(notebook(), submitted)
    assert sources(rebuilt) == [
        *sources(notebook())[:4],
        "Because",
        "The end",
        *sources(submitted)[6:9],
    ]
    assert rebuilt.metadata["rebuild"] == [
        "cell 3 is longer than 100 bytes, so it was left out",
        "cell 10 exceeds the limit of 3 added cells, so it was left out",
        "cell 11 exceeds the limit of 3 added cells, so it was left out",
    ]
    submitted = insert(answered(), 6, *(v4.new_code_cell(char * 99) for char in "ab"))
    submitted.cells += [v4.new_code_cell("é" * 49), v4.new_raw_cell("raw"), v4.new_code_cell(" \n")]
    rebuilt = rebuild(notebook(), submitted)
    assert sources(rebuilt) == sources(submitted)[:7]
    assert [note.partition(" ")[2] for note in rebuilt.metadata["rebuild"]] == [
        "8 exceeds the limit of 240 bytes in all cells together, so it was left out",
        "9 exceeds the limit of 240 bytes in all cells together, so it was left out",
        "10 is neither code nor Markdown, so it was left out",
    ]


def test_notes_are_few_and_in_our_own_words() -> None:
    evil = "<script>alert(1)</script>"
    submitted = answered()
    for _ in range(200):
        cell = copy.deepcopy(submitted.cells[3])
        cell.source = cell.id = cell.cell_type = cell.metadata.nbgrader.extra = evil
        submitted.cells.append(cell)
    rebuilt = rebuild(notebook(), submitted)
    assert len(rebuilt.metadata["rebuild"]) == module.MAX_NOTES + 1
    assert rebuilt.metadata["rebuild"][-1] == "and 180 more"
    assert evil not in nbformat.writes(rebuilt)


def test_text_that_no_file_can_hold_is_made_harmless() -> None:
    submitted = answered("x = '\ud800\0'")
    rebuilt = rebuild(notebook(), submitted)
    assert rebuilt.cells[2].source == "x = '??'"
    nbformat.writes(rebuilt).encode()


json = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
names = st.sampled_from(["intro", "setup", "write", "test", "why", "end", "added-1", "other", ""])
texts = st.sampled_from([STUB, RIGHT, TEST, "two = 2", "The end", "Because", "mine", "", " "])
cells = st.fixed_dictionaries(
    {},
    optional={
        "cell_type": st.one_of(st.sampled_from(["code", "markdown", "raw"]), json),
        "id": st.one_of(names, json),
        "source": st.one_of(texts, st.text(max_size=5), json),
        "metadata": st.one_of(
            st.just({}),
            json,
            st.builds(
                lambda name, grade, solution: tracked(name, grade=grade, solution=solution),
                names,
                st.booleans(),
                st.booleans(),
            ),
            st.builds(lambda name: {"nbgrader": name}, json),
        ),
        "outputs": json,
        "attachments": json,
    },
)
submissions = st.one_of(
    st.builds(lambda found: {"cells": found}, st.one_of(st.lists(cells, max_size=10), json)),
    st.dictionaries(st.text(max_size=5), json, max_size=2),
    # Shuffled and partly repeated versions of a real one, between arbitrary cells.
    st.builds(
        lambda picked, others: {
            "cells": [c for pair in zip(picked, others, strict=False) for c in pair]
        },
        st.lists(st.sampled_from(answered().cells), max_size=10),
        st.lists(cells, max_size=10),
    ),
)


@settings(max_examples=150)
@given(submissions)
def test_anything_becomes_a_valid_notebook_of_the_released_structure(submitted: Any) -> None:
    released = notebook()
    rebuilt = rebuild(released, nbformat.from_dict(submitted))
    nbformat.validate(rebuilt)
    MetadataValidator().validate_nb(rebuilt)
    added = {cell.id for cell in rebuilt.cells} - {cell.id for cell in released.cells}
    kept = [cell for cell in rebuilt.cells if cell.id not in added]
    for old, new in zip(released.cells, kept, strict=True):
        assert (old.id, old.cell_type, old.metadata) == (new.id, new.cell_type, new.metadata)
        if old.id in ("intro", "test"):
            assert old.source == new.source
    assert all(not c.metadata and c.source.strip() for c in rebuilt.cells if c.id in added)
    assert "rebuild" not in rebuilt.metadata or all(rebuilt.metadata["rebuild"])
    again = rebuild(released, rebuilt)
    assert again.cells == rebuilt.cells and "rebuild" not in again.metadata


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


def _rename(index: int) -> Callable[[NotebookNode], None]:
    return lambda nb: nb.cells[index].metadata.nbgrader.update(grade_id="renamed")


def _skip_all(nb: NotebookNode) -> None:
    for cell in nb.cells:
        cell.metadata["tags"] = ["skip-execution"]


def _as_text(index: int) -> Callable[[NotebookNode], None]:
    def change(nb: NotebookNode) -> None:
        old = nb.cells[index]
        nb.cells[index] = v4.new_markdown_cell(old.source, id=old.id, metadata=old.metadata)

    return change


def _strip(nb: NotebookNode) -> None:
    for cell in nb.cells:
        cell.metadata = {}


def _strip_and_renumber(nb: NotebookNode) -> None:
    for number, cell in enumerate(nb.cells):
        cell.metadata, cell.id = {}, f"new-{number}"


def _damage(nb: NotebookNode) -> None:
    nb.cells[0].metadata.nbgrader = {"schema_version": "0", "grade_id": ["list"]}
    nb.cells[3].metadata.nbgrader = {"schema_version": 99}
    nb.cells[5].metadata.nbgrader = "text"


def _add_ten_thousand(nb: NotebookNode) -> None:
    # With so many random ids, two are equal in one run of a hundred.
    nb.cells += [v4.new_code_cell(f"n = {n}", id=f"n-{n}") for n in range(10_000)]


CHANGES: dict[str, tuple[Callable[[NotebookNode], Any], bool]] = {
    "nothing": (lambda nb: None, True),
    "test duplicated": (_duplicate(3), True),
    "solution duplicated": (_duplicate(2), True),
    "written answer duplicated": (_duplicate(4), True),
    "test flipped": (_flip, True),
    "test deleted": (lambda nb: nb.cells.pop(3), True),
    "test renamed": (_rename(3), True),
    "test as text": (_as_text(3), True),
    "test emptied": (lambda nb: nb.cells[3].update(source=""), True),
    "points raised": (lambda nb: nb.cells[3].metadata.nbgrader.update(points=1e9), True),
    "solution renamed": (_rename(2), True),
    "solution as text": (_as_text(2), True),
    "solution deleted": (lambda nb: nb.cells.pop(2), False),
    "all tagged to be skipped": (_skip_all, True),
    "metadata stripped": (_strip, True),
    "metadata and ids lost": (_strip_and_renumber, True),
    "metadata damaged": (_damage, True),
    "kernel changed": (lambda nb: nb.metadata.update(kernelspec={"name": "evil"}), True),
    "all cells deleted": (lambda nb: nb.cells.clear(), False),
    "ten thousand cells": (_add_ten_thousand, True),
}


@graded_by_nbgrader
def test_every_damaged_notebook_is_graded_in_a_real_course(course: Course) -> None:
    """Each change is submitted with the right answer, and again with a wrong one."""
    expected = {}
    for name, (change, counts) in CHANGES.items():
        for code, points in [(RIGHT, POINTS if counts else 0.0), (WRONG, 0.0)]:
            if name == "ten thousand cells" and code == WRONG:
                continue
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
        assert names == ["test", "why"]
        answer = next(cell.source for cell in graded.cells if cell.id == "why")
        kept = student.rpartition("_")[0] not in ("all_cells_deleted", "metadata_and_ids_lost")
        stub = start_from(course).cells[4].source
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
