"""No history of a desk, in any order, loses a word or an output of the student's."""

import contextlib
import os
import re
import tempfile
from pathlib import Path
from unittest.mock import patch

import nbformat
from hypothesis import given, settings
from hypothesis import strategies as st
from nbformat import v4

from course_lib.learner._desk import refresh
from course_lib.learner.notebooks import words

NOTEBOOK, TEXT = "lectures/01_topic.ipynb", "assignments/02_topic/checks.py"


class Killed(BaseException):
    """Stands for a sudden end."""


class Desk:
    """A course, a student's desk, and what may happen to either between two refreshes."""

    def __init__(self, root: Path) -> None:
        self.course, self.desk = root / "course", root / "desk"
        self.count = 0
        self.touched: set[str] = set()
        for name in (NOTEBOOK, TEXT):
            self.edit_course(name, "first", False)
        refresh(self.course, self.desk)

    def files(self) -> list[Path]:
        found = self.desk.rglob("*.*")
        return sorted(path for path in found if path.is_file() and ".desk" not in path.parts)

    def students(self) -> set[bytes]:
        """Return all that the student wrote or ran and that is on the desk now."""
        contents = b"\n".join(path.read_bytes() for path in self.files())
        return set(re.findall(rb"mine-\d+", contents))

    def token(self) -> str:
        self.count += 1
        return f"mine-{self.count}"

    # Actions of the course's authors -------------------------------------------------------

    def edit_course(self, name: str, text: str | None, tag: bool) -> None:
        path = self.course / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            path.unlink(missing_ok=True)
        elif path.suffix == ".ipynb":
            cells = [v4.new_code_cell(text, id="one"), v4.new_code_cell("same", id="two")]
            cells[0].metadata = {"tags": ["hide-input"]} if tag else {}
            nbformat.write(v4.new_notebook(cells=cells), path)
        else:
            path.write_text(text)

    # Actions of the student ----------------------------------------------------------------

    def act(self, action: str, number: int) -> None:
        """Do something to one of the desk's files: the first ones are likely to be ours."""
        if not (files := self.files()):
            return
        path = files[number % len(files)]
        self.touched.add(path.name.partition(".")[0])
        if action == "deletes":
            path.unlink()
        elif action == "takes over":
            path.replace(path.with_name(re.sub(r"\.(new|old)(-\d+)?", "", path.name)))
        elif action == "damages" or path.suffix != ".ipynb":
            path.write_text(path.read_text() + self.token())
        else:
            with contextlib.suppress(nbformat.reader.NotJSONError):
                notebook = nbformat.read(path, as_version=4)
                if action == "writes":
                    notebook.cells[0].source += self.token()
                else:
                    notebook.cells[0].outputs = [v4.new_output("stream", text=self.token())]
                    notebook.cells.append(v4.new_code_cell(""))
                nbformat.write(notebook, path)

    def lose_the_records(self) -> None:
        (self.desk / ".desk/handed_out.json").unlink(missing_ok=True)
        self.touched |= {"01_topic", "checks"}

    # What follows --------------------------------------------------------------------------

    def refresh(self, writes: int | None) -> None:
        """Refresh, killed after so many writes unless that is None, and look what is left."""
        before, real, left = self.students(), os.replace, iter(range(writes or 0))

        def replace(*arguments) -> None:
            if writes is not None and next(left, None) is None:
                raise Killed
            real(*arguments)

        with patch("os.replace", replace), contextlib.suppress(Killed):
            refresh(self.course, self.desk)
            writes = None
        assert before <= self.students(), "something of the student's is lost"
        if writes is None:
            self.look()
        else:  # what it had put there is not recorded, so it may count as the student's
            self.touched |= {"01_topic", "checks"}

    def look(self) -> None:
        for name in (NOTEBOOK, TEXT):
            path = self.desk / name
            if path.name.partition(".")[0] in self.touched:
                continue
            beside = [each.name for each in self.files() if each.parent == path.parent]
            if (self.course / name).exists():
                new = words(name, (self.course / name).read_bytes())
                assert words(name, path.read_bytes()) == new, "not the course's version"
                assert beside == [path.name], "something beside what nobody touched"
        before = {path: path.read_bytes() for path in self.files()}
        refresh(self.course, self.desk)
        assert {path: path.read_bytes() for path in self.files()} == before


names = st.sampled_from([NOTEBOOK, TEXT])
versions = st.sampled_from(["first", "second", "third", None])
actions = st.sampled_from(["runs", "writes", "takes over", "deletes", "damages"])
rounds = st.fixed_dictionaries(
    {
        "course": st.lists(st.tuples(names, versions, st.booleans()), max_size=2),
        "student": st.lists(st.tuples(actions, st.integers(0, 5)), max_size=2),
        "killed": st.one_of(st.none(), st.none(), st.integers(0, 4)),
        "records lost": st.sampled_from([False, False, False, False, True]),
    }
)


@settings(max_examples=30)
@given(st.lists(rounds, min_size=2, max_size=6))
def test_nothing_of_the_students_is_ever_lost(history) -> None:
    with tempfile.TemporaryDirectory(prefix="desk-") as root:
        desk = Desk(Path(root))
        for each in history:
            for action in each["student"]:
                desk.act(*action)
            for edit in each["course"]:
                desk.edit_course(*edit)
            if each["records lost"]:
                desk.lose_the_records()
            desk.refresh(each["killed"])
