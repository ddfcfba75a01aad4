"""Damage, interruptions and obstacles: a refresh says what it met, and loses nothing."""

import pytest

from course_lib.learner import CannotGoOn
from course_lib.learner.__main__ import main
from course_lib.learner._desk import refresh
from tests.helpers.desk_files import CHECKS, HANDED_OUT, LECTURE, notebook, sources, there, write

DAMAGED = [
    *("", "[]", '{"cells": 1}', '{"cells": [1]}', "<<<<<<< HEAD", "[" * 100_000),
    '{"cells": [{"cell_type": "code", "source": {}}]}',
]


@pytest.mark.parametrize("content", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_notebook_stays_and_a_new_version_is_beside_it(course, desk, content):
    write(desk / LECTURE, content)
    write(course / LECTURE, notebook("a = 2"))
    for _ in range(2):
        refresh(course, desk)
        assert (desk / LECTURE).read_text() == content
        assert sources(desk / "lectures/01_topic.new.ipynb") == ["a = 2"]
        assert len(there(desk)) == len(HANDED_OUT) + 1


NO_RECORDS = [None, *DAMAGED, '{"version": 1, "files": {"x": 1}}']


@pytest.mark.parametrize("content", NO_RECORDS, ids=range(len(NO_RECORDS)))
def test_without_records_what_differs_is_the_students(course, desk, content):
    records = desk / ".desk/handed_out.json"
    records.unlink()
    if content is not None:
        records.write_text(content)
    write(desk / LECTURE, notebook("mine"))
    write(course / CHECKS, "CHECKS = 2")
    notes = refresh(course, desk)
    assert [note.partition(" ")[0] for note in notes] == [LECTURE, CHECKS]
    assert sources(desk / LECTURE) == ["mine"]
    assert (desk / CHECKS).read_text() == "CHECKS = 1"
    assert (desk / "assignments/02_topic/checks.new.py").read_text() == "CHECKS = 2"
    assert there(desk) == sorted(
        [*HANDED_OUT, "lectures/01_topic.new.ipynb", "assignments/02_topic/checks.new.py"]
    )
    assert refresh(course, desk) == []


def test_the_command_says_what_a_student_should_know(course, desk, monkeypatch, capsys):
    opened = []

    def open_lab(desk, _: object) -> None:
        opened.append(desk)
        raise CannotGoOn("stop")

    monkeypatch.setattr("course_lib.learner.lab.open_lab", open_lab)
    monkeypatch.setattr("course_lib.learner.lab.find_course", lambda: course)
    write(desk / LECTURE, notebook("mine"))
    write(course / LECTURE, notebook("a = 2"))
    main(["lab"])
    assert opened == [desk]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"course lab: {LECTURE} has your changes")
    monkeypatch.setattr("course_lib.learner.lab.find_course", lambda: course / "lectures")
    assert main(["lab"]) == 2
    assert opened == [desk]
    assert "pip install -e" in capsys.readouterr().err
