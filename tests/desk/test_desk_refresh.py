"""Whatever a student and the course did to a file, a refresh loses nothing of the student's."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat import NotebookNode, v4

from course_lib.desk.__main__ import main
from course_lib.desk.refresh import refresh

LECTURE = "lectures/01_topic.ipynb"
CHECKS = "assignments/02_topic/checks.py"
MODULE = "course_lib/sgd.py"


def notebook(*texts: str, link: str = "../course_lib/sgd.py") -> NotebookNode:
    cells = [v4.new_markdown_cell(f"# Topic\n[module]({link})", id="title")]
    cells += [v4.new_code_cell(text, id=f"code-{i}") for i, text in enumerate(texts)]
    return v4.new_notebook(cells=cells)


def ran(nb: NotebookNode) -> NotebookNode:
    """Return the notebook as JupyterLab leaves it after Run All: outputs, metadata, a new cell."""
    nb = copy.deepcopy(nb)
    for count, cell in enumerate((cell for cell in nb.cells if cell.cell_type == "code"), 1):
        cell.outputs = [v4.new_output("stream", text=f"result of {cell.source}\n")]
        cell.execution_count, cell.metadata = count, {"collapsed": True}
    nb.metadata = {"language_info": {"name": "python", "version": "3.11.7"}}
    nb.cells.append(v4.new_code_cell("", id="added"))
    return nb


def write(path: Path, content: NotebookNode | str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else nbformat.writes(content))


def sources(path: Path) -> list[str]:
    return [cell.source for cell in nbformat.read(path, as_version=4).cells[1:]]


def outputs(path: Path) -> list[str]:
    cells = nbformat.read(path, as_version=4).cells
    return [out.text for cell in cells for out in cell.get("outputs", [])]


@pytest.fixture
def course(tmp_path: Path) -> Path:
    """Return a course with a lecture that was run, an assignment, and a module to read."""
    root = tmp_path / "the course"
    write(root / LECTURE, ran(notebook("a = 1", "print(a)")))
    write(root / "assignments/02_topic/02_topic.ipynb", notebook("def f(): ..."))
    write(root / CHECKS, "CHECKS = 1")
    write(root / MODULE, "def sgd(): ...")
    write(root / "course_lib/secret.py", "not linked")
    write(root / "instructor/02_topic/hidden.py", "HIDDEN = 1")
    write(root / "lectures/.ipynb_checkpoints/01_topic.ipynb", "{}")
    write(root / "assignments/02_topic/__pycache__/checks.pyc", "")
    return root


@pytest.fixture
def desk(course: Path) -> Path:
    """Return a desk to which everything was handed out once."""
    assert refresh(course, course / "work") == []
    return course / "work"


def there(desk: Path) -> list[str]:
    """Return the files of the desk, without its records."""
    paths = (path.relative_to(desk) for path in desk.rglob("*") if path.is_file())
    return sorted(str(path) for path in paths if path.parts[0] != ".desk")


def state(desk: Path) -> dict[str, tuple[int, bytes]]:
    """Return inode and content of every file: what is written anew gets another inode."""
    return {name: ((desk / name).stat().st_ino, (desk / name).read_bytes()) for name in there(desk)}


HANDED_OUT = ["assignments/02_topic/02_topic.ipynb", CHECKS, MODULE, LECTURE]


def test_copies_are_handed_out_without_outputs_and_links_find_their_file(desk: Path) -> None:
    assert there(desk) == HANDED_OUT
    assert sources(desk / LECTURE) == ["a = 1", "print(a)", ""]
    assert outputs(desk / LECTURE) == []
    assert not stat.S_IMODE((desk / MODULE).stat().st_mode) & 0o222, "to be read, not worked in"
    assert stat.S_IMODE((desk / CHECKS).stat().st_mode) & 0o200


def test_nothing_is_written_where_nothing_has_changed(course: Path, desk: Path) -> None:
    before = state(desk)
    assert refresh(course, desk) == []
    assert state(desk) == before


def test_what_the_student_left_alone_is_replaced_silently(course: Path, desk: Path) -> None:
    write(course / LECTURE, notebook("a = 2"))
    write(course / CHECKS, "CHECKS = 2")
    write(course / MODULE, "def better(): ...")
    assert refresh(course, desk) == []
    assert sources(desk / LECTURE) == ["a = 2"]
    assert (desk / CHECKS).read_text() == "CHECKS = 2"
    assert (desk / MODULE).read_text() == "def better(): ..."
    assert there(desk) == HANDED_OUT


def test_what_only_the_student_changed_stays(course: Path, desk: Path) -> None:
    write(desk / LECTURE, ran(notebook("a = 1", "mine")))
    write(desk / CHECKS, "CHECKS = 'mine'")
    before = state(desk)
    assert refresh(course, desk) == []
    assert state(desk) == before


def test_what_both_changed_stays_and_the_new_version_is_laid_beside_it_once(
    course: Path, desk: Path
) -> None:
    write(desk / LECTURE, notebook("a = 1", "mine"))
    write(course / LECTURE, notebook("a = 2"))
    (note,) = refresh(course, desk)
    assert note == (
        f"{LECTURE} is changed by you: it stays, the new version is beside it as 01_topic.new.ipynb"
    )
    beside = desk / "lectures/01_topic.new.ipynb"
    assert sources(desk / LECTURE) == ["a = 1", "mine"] and sources(beside) == ["a = 2"]
    before = state(desk)
    assert refresh(course, desk) == [] and state(desk) == before
    beside.unlink()
    assert refresh(course, desk) == [] and not beside.exists()


def test_a_new_version_that_was_taken_over_counts_as_handed_out(course: Path, desk: Path) -> None:
    write(desk / LECTURE, notebook("mine"))
    write(course / LECTURE, notebook("a = 2"))
    refresh(course, desk)
    (desk / "lectures/01_topic.new.ipynb").replace(desk / LECTURE)
    write(course / LECTURE, notebook("a = 3"))
    assert refresh(course, desk) == []
    assert sources(desk / LECTURE) == ["a = 3"] and there(desk) == HANDED_OUT


def test_the_next_version_replaces_the_one_beside_it_unless_that_was_used(
    course: Path, desk: Path
) -> None:
    write(desk / LECTURE, notebook("mine"))
    for version, use in [("a = 2", None), ("a = 3", notebook("mine, too")), ("a = 4", None)]:
        write(course / LECTURE, notebook(version))
        (note,) = refresh(course, desk)
        beside = desk / "lectures" / note.rpartition(" ")[2]
        assert sources(beside) == [version]
        if use:
            write(beside, use)
    assert sources(desk / "lectures/01_topic.new.ipynb") == ["mine, too"]
    assert sources(desk / "lectures/01_topic.new-2.ipynb") == ["a = 4"]
    assert len(there(desk)) == len(HANDED_OUT) + 2


def test_a_notebook_that_was_only_run_stays_as_it_is(course: Path, desk: Path) -> None:
    write(desk / LECTURE, ran(notebook("a = 1", "print(a)")))
    before = state(desk)
    assert refresh(course, desk) == [] and state(desk) == before


def test_outputs_of_a_version_that_is_replaced_are_kept_beside_it(course: Path, desk: Path) -> None:
    write(desk / LECTURE, ran(notebook("a = 1", "print(a)")))
    write(course / LECTURE, notebook("a = 2"))
    (note,) = refresh(course, desk)
    assert note.endswith("yours, with its outputs, is now 01_topic.old.ipynb")
    assert outputs(desk / "lectures/01_topic.old.ipynb") == [
        *("result of a = 1\n", "result of print(a)\n")
    ]
    assert sources(desk / LECTURE) == ["a = 2"] and outputs(desk / LECTURE) == []
    write(desk / LECTURE, ran(notebook("a = 2")))
    write(course / LECTURE, notebook("a = 3"))
    assert "now 01_topic.old-2.ipynb" in refresh(course, desk)[0]
    assert len(outputs(desk / "lectures/01_topic.old.ipynb")) == 2


def test_a_new_version_with_the_same_words_takes_the_outputs_with_it(
    course: Path, desk: Path
) -> None:
    write(desk / LECTURE, ran(notebook("a = 1", "print(a)")))
    new = notebook("a = 1", "print(a)")
    new.cells[1].metadata["tags"] = ["hide-input"]
    write(course / LECTURE, new)
    assert refresh(course, desk) == []
    assert outputs(desk / LECTURE) == ["result of a = 1\n", "result of print(a)\n"]
    got = nbformat.read(desk / LECTURE, as_version=4)
    assert got.cells[1].metadata == {"tags": ["hide-input"]} and got.cells[2].execution_count == 2
    assert there(desk) == HANDED_OUT


def test_a_deleted_file_is_handed_out_again(course: Path, desk: Path) -> None:
    write(desk / LECTURE, notebook("mine"))
    refresh(course, desk)
    (desk / LECTURE).unlink()
    assert refresh(course, desk) == []
    assert sources(desk / LECTURE) == ["a = 1", "print(a)", ""]


DAMAGED = [
    *("", "{", "[]", "{}", '{"cells": 1}', '{"cells": [1]}', "<<<<<<< HEAD", "[" * 100_000),
    '{"cells": [{"cell_type": "code", "source": {}}]}',
]


@pytest.mark.parametrize("content", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_notebook_stays_and_a_good_one_is_beside_it(
    course: Path, desk: Path, content: str
) -> None:
    write(desk / LECTURE, content)
    for _ in range(2):  # as long as it is damaged
        (note,) = refresh(course, desk)
        assert "cannot be read" in note and "01_topic.new.ipynb" in note
        assert (desk / LECTURE).read_text() == content
        assert sources(desk / "lectures/01_topic.new.ipynb") == ["a = 1", "print(a)", ""]
        assert len(there(desk)) == len(HANDED_OUT) + 1


NO_RECORDS = [None, *DAMAGED, '{"version": 1, "files": {"x": 1}}']


@pytest.mark.parametrize("content", NO_RECORDS, ids=range(len(NO_RECORDS)))
def test_without_records_what_differs_is_the_students(
    course: Path, desk: Path, content: str | None
) -> None:
    records = desk / ".desk/handed_out.json"
    records.unlink()
    if content is not None:
        records.write_text(content)
    write(desk / LECTURE, notebook("mine"))
    write(course / CHECKS, "CHECKS = 2")
    notes = refresh(course, desk)
    assert ("record" in notes[0]) == (content is not None)
    assert [note.partition(" ")[0] for note in notes[-2:]] == [LECTURE, CHECKS]
    assert sources(desk / LECTURE) == ["mine"]
    assert (desk / CHECKS).read_text() == "CHECKS = 1"
    assert (desk / "assignments/02_topic/checks.new.py").read_text() == "CHECKS = 2"
    assert there(desk) == sorted(
        [*HANDED_OUT, "lectures/01_topic.new.ipynb", "assignments/02_topic/checks.new.py"]
    )
    assert refresh(course, desk) == []


class Killed(BaseException):
    """Stands for a sudden end."""


@contextlib.contextmanager
def killed_after(writes: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a refresh write so many files, and kill it at the next one."""
    left = iter(range(writes))
    real = os.replace

    def replace(*arguments: Any) -> None:
        if next(left, None) is None:
            raise Killed
        real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        yield


@pytest.mark.parametrize("first", [False, True])
def test_an_interrupted_refresh_is_taken_up_wherever_it_stopped(
    course: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """Killed at each write in turn; then the course goes on, and nothing counts as changed."""
    stopped = 0
    for limit in range(20):
        desk = tmp_path / f"desk-{limit}"
        write(course / LECTURE, notebook("a = 1"))
        write(course / CHECKS, "CHECKS = 1")
        if not first:
            refresh(course, desk)
            write(course / LECTURE, notebook("a = 2"))
            write(course / CHECKS, "CHECKS = 2")
        with killed_after(limit, monkeypatch):
            try:
                refresh(course, desk)
            except Killed:
                stopped += 1
        write(course / LECTURE, notebook("a = 3"))
        assert refresh(course, desk) == []
        assert there(desk) == HANDED_OUT
        assert sources(desk / LECTURE) == ["a = 3"]
        assert [path.name for path in (desk / ".desk").iterdir()] == ["handed_out.json"]
    assert stopped >= 4


def test_a_folder_or_a_dead_link_in_the_way_stays(course: Path, desk: Path) -> None:
    (desk / LECTURE).unlink()
    (desk / LECTURE).mkdir()
    (desk / CHECKS).unlink()
    (desk / CHECKS).symlink_to(desk / "nowhere")
    (desk / "lectures/01_topic.new.ipynb").mkdir()
    notes = refresh(course, desk)
    assert [note.partition(" ")[0] for note in notes] == [LECTURE, CHECKS]
    assert (desk / LECTURE).is_dir() and (desk / CHECKS).is_symlink()
    assert sources(desk / "lectures/01_topic.new-2.ipynb") == ["a = 1", "print(a)", ""]


def test_what_the_course_drops_goes_unless_it_is_the_students(course: Path, desk: Path) -> None:
    write(desk / CHECKS, "CHECKS = 'mine'")
    (course / LECTURE).unlink()
    (course / CHECKS).unlink()
    assert refresh(course, desk) == [f"{CHECKS} is no longer part of the course: yours stays"]
    assert there(desk) == ["assignments/02_topic/02_topic.ipynb", CHECKS]
    assert not (desk / "lectures").exists() and not (desk / "course_lib").exists()
    assert refresh(course, desk) == []


def test_a_lecture_that_is_damaged_in_the_course_takes_nothing_away(
    course: Path, desk: Path
) -> None:
    write(course / LECTURE, "<<<<<<< HEAD")
    assert refresh(course, desk) == [f"{LECTURE} is damaged in the course itself: not handed out"]
    assert sources(desk / LECTURE) == ["a = 1", "print(a)", ""]


def test_a_students_own_file_under_a_name_that_the_course_takes_later(
    course: Path, desk: Path
) -> None:
    write(desk / "lectures/03_later.ipynb", notebook("my notes"))
    write(desk / "lectures/notes.txt", "mine")
    write(course / "lectures/03_later.ipynb", notebook("a = 3"))
    (note,) = refresh(course, desk)
    assert note.startswith("lectures/03_later.ipynb is changed by you")
    assert sources(desk / "lectures/03_later.ipynb") == ["my notes"]
    assert (desk / "lectures/notes.txt").read_text() == "mine"


def test_a_desk_that_cannot_be_written_is_told_with_a_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["--desk", str(tmp_path / "file/desk")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "Not a directory" in line and "another folder with --desk" in line


def test_the_command_says_what_a_student_should_know(
    course: Path, desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("course_lib.desk.__main__.COURSE", course)
    write(desk / LECTURE, notebook("mine"))
    write(course / LECTURE, notebook("a = 2"))
    assert main([]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"desk: {LECTURE} is changed by you")
    monkeypatch.setattr("course_lib.desk.__main__.COURSE", course / "lectures")
    assert main([]) == 2
    assert "pip install -e" in capsys.readouterr().err


def test_records_are_small_and_hold_no_text(desk: Path) -> None:
    told = json.loads((desk / ".desk/handed_out.json").read_text())
    assert told["version"] == 1 and sorted(told["files"]) == HANDED_OUT
    assert all(len(word) == 64 for entry in told["files"].values() for word in entry["words"])
