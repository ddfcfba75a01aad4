"""Other files and damage in a notebook are noted; they are never fatal, and cost nobody a mark."""

from __future__ import annotations

import itertools
import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbgrader.apps.api import NbGraderAPI

from autograder.collection.listing import files_below
from autograder.collection.repair import MAX_FILES, cells_of, notes, read_content, repaired, vet
from autograder.commands.demo import ASSIGNMENT
from autograder.course import Folders, load_config
from autograder.examination.verdict import Verdict, verdict_path
from autograder.passes.examine import rebuilt
from course_lib.learner.what_counts import is_run, role
from tests.helpers.course_folders import needs_sources
from tests.helpers.whole_class import TASKS, notebook_of

pytestmark = pytest.mark.filterwarnings("ignore")  # nbgrader's, and what it stands on

FILE = f"{ASSIGNMENT}.ipynb"
ALL = sum(TASKS.values())


def link_to_another(folder: Path) -> None:
    (folder / FILE).unlink()
    (folder / FILE).symlink_to(folder.parents[1] / "right" / ASSIGNMENT / FILE)


def without_metadata(folder: Path) -> None:
    content = json.loads((folder / FILE).read_text())
    content["metadata"] = None
    content["cells"][0]["metadata"] = None
    content["cells"].append(7)
    (folder / FILE).write_text(json.dumps(content))


def written(change: Callable[[nbformat.NotebookNode], Any]) -> Callable[[Path], Any]:
    def write(folder: Path) -> None:
        notebook = nbformat.read(folder / FILE, as_version=4)
        change(notebook)
        (folder / FILE).write_text(nbformat.v4.writes_json(notebook))

    return write


def with_damaged_roles(notebook: nbformat.NotebookNode) -> None:
    for cell in notebook.cells:
        role = cell.metadata.get("nbgrader", {})
        if role.get("grade"):
            role.clear()
            role.update(schema_version=99)


def saved_in(encoding: str) -> Callable[[Path], Any]:
    """Save the notebook as editors of Windows may, with letters that are not ASCII's."""

    def save(folder: Path) -> None:
        content = json.loads((folder / FILE).read_text())
        content["cells"].insert(1, nbformat.v4.new_code_cell("# Größe, é\nx = 'ü'"))
        text = json.dumps(content, ensure_ascii=False)
        (folder / FILE).write_bytes(text.encode(encoding, "replace"))

    return save


def with_many_cells(notebook: nbformat.NotebookNode) -> None:
    notebook.cells += [nbformat.v4.new_code_cell("x = 1") for _ in range(10_000)]


def cut_off(folder: Path) -> None:
    """Leave the file that an upload leaves which was interrupted within the last cells."""
    text = (folder / FILE).read_text()
    (folder / FILE).write_text(text[: text.rindex('"cell_type"') + 100])


def many_files(folder: Path) -> None:
    for number in range(2_000):
        (folder / f"{number}.txt").touch()


# Name → what is done to the folder of a right submission, its points, a word of its notes.
BESIDE: dict[str, tuple[Callable[[Path], Any], float, str]] = {
    "right": (lambda folder: (folder / "note.txt").write_text("hello"), ALL, ""),
    "time": (lambda f: (f / "timestamp.txt").write_bytes(b"\xff\0 soon"), ALL, "contains no time"),
    "spy": (lambda f: (f / "x").symlink_to("/etc/passwd"), ALL, "not an ordinary file"),
    "files": (many_files, ALL, "files may be submitted"),
    "roles": (written(with_damaged_roles), ALL, ""),
    "null": (without_metadata, ALL, "is damaged"),
    "utf-16": (saved_in("utf-16"), ALL, "is in utf-16"),
    "latin": (saved_in("latin-1"), ALL, "some letters are lost"),
    "10,000 cells": (written(with_many_cells), ALL, "left out"),
    "cut": (cut_off, ALL, "is damaged, and"),
    "link": (link_to_another, 0, "is a link"),
    "garbage": (lambda f: (f / FILE).write_bytes(os.urandom(5000)), 0, "is not JSON"),
}


@pytest.fixture(scope="module")
def course(released_course: Path, copy_of: Callable[[Path], Path]) -> NbGraderAPI:
    """A course of these submissions."""
    root = copy_of(released_course)
    notebook = notebook_of(root)
    for name, (change, _, _) in BESIDE.items():
        folder = root / "grading/submitted" / name / ASSIGNMENT
        folder.mkdir(parents=True)
        nbformat.write(notebook, folder / FILE)
        change(folder)
    return NbGraderAPI(config=load_config(root))


@needs_sources
@pytest.mark.parametrize("name", BESIDE)
def test_it_is_noted_and_what_counts_is_as_written(course: NbGraderAPI, name: str) -> None:
    _, points, note = BESIDE[name]
    folders = Folders.of(course.coursedir)
    path = folders.submitted / name / ASSIGNMENT / FILE
    vet(ASSIGNMENT, name, [str(path)])
    nb = rebuilt(folders, path)
    remarks = [*notes[name, ASSIGNMENT], *nb.metadata.get("rebuild", ())]
    assert note in str(remarks) and bool(note) == bool(remarks), remarks
    code = [cell.source for cell in nb.cells]
    right = notebook_of(folders.data.parent).cells
    solutions = [cell.source for cell in right if is_run(cell) and role(cell).get("solution")]
    assert solutions and all((source in code) == (points == ALL) for source in solutions)
    assert all(stat.S_ISREG(info.st_mode) for _, info in files_below(path.parent))
    aside = folders.data / "set_aside" / name / ASSIGNMENT
    if name == "time":
        assert (aside / "timestamp.txt").read_bytes() == b"\xff\0 soon"
    if name == "spy":
        assert (aside / "x").is_symlink()
    if name == "files":
        assert len(list(aside.iterdir())) == 2_000 - MAX_FILES


@needs_sources
@pytest.mark.parametrize("name", ["null", "link"])
def test_it_is_not_fatal_in_nbgrader(course: NbGraderAPI, name: str) -> None:
    _, points, note = BESIDE[name]
    outcome = course.autograde(ASSIGNMENT, name)
    assert outcome["success"], (name, str(outcome.get("log"))[-3000:])
    data = Folders.of(course.coursedir).data
    verdict = Verdict.read(verdict_path(data, ASSIGNMENT, name, ASSIGNMENT))
    assert verdict.score == points == course.get_submission(ASSIGNMENT, name)["code_score"]
    assert note in str(verdict.notes)


@needs_sources
def test_an_assignment_without_a_release_is_an_error_and_not_a_zero(course: NbGraderAPI) -> None:
    released = Folders.of(course.coursedir).release / ASSIGNMENT / FILE
    content = released.read_bytes()
    released.unlink()
    try:
        outcome = course.autograde(ASSIGNMENT, "null")
    finally:
        released.write_bytes(content)
    assert not outcome["success"]
    assert f"nbgrader generate_assignment {ASSIGNMENT}" in outcome["log"]
    assert course.get_submission(ASSIGNMENT, "null")["code_score"] in (0, ALL)


def _vet_until(step: int, path: Path) -> bool:
    """Vet a submission in a process that is gone before its `step`-th call to the system."""
    if (child := os.fork()) == 0:
        steps = itertools.count()
        sys.addaudithook(lambda name, _: next(steps) == step and os._exit(9))
        vet(ASSIGNMENT, path.parents[1].name, [str(path)])
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_kill_while_it_is_repaired_loses_nothing(tmp_path: Path) -> None:
    ended, step = False, 0
    while not ended:
        path = tmp_path / f"{step}/submitted/ada" / ASSIGNMENT / FILE
        path.parent.mkdir(parents=True)
        path.write_text("{" + "x" * step)
        ended = _vet_until(step, path)
        vet(ASSIGNMENT, "ada", [str(path)])
        (note,) = notes["ada", ASSIGNMENT]
        assert "is not JSON" in note
        assert nbformat.read(path, as_version=4).cells == []
        aside = tmp_path / f"{step}/set_aside/ada" / ASSIGNMENT / FILE
        assert aside.read_text() == "{" + "x" * step
        step += 1
    assert step > 5


@pytest.mark.parametrize(
    "data", [b"", b"null", b"[]", b"[" * 100_000, b'{"cells": {}}', b"\xff\xfe", b'{"cells": [[]]}']
)
def test_whatever_it_is_a_notebook_comes_out(data: bytes) -> None:
    problem, content = read_content(data)
    assert problem or cells_of(content) is None or data.endswith(b"[[]]}")
    nbformat.validate(nbformat.from_dict(repaired(content)))


def test_damage_in_the_middle_costs_its_own_cell_only() -> None:
    cells = [nbformat.v4.new_code_cell(f"n = {n}", id=f"n-{n}") for n in range(9)]
    text = nbformat.writes(nbformat.v4.new_notebook(cells=cells))
    at = text.index("n = 4")
    for damaged in (text[: at - 3] + text[at:], text[:at] + "\\" + text[at + 4 :]):
        problem, content = read_content(damaged.encode())
        sources = [cell["source"] for cell in repaired(content)["cells"]]
        assert problem and sources == [f"n = {n}" for n in range(9) if n != 4]
