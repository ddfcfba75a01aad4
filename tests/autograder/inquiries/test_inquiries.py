"""Questions are taken, answered and read again; no student can write in another's name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autograder.__main__ import main
from autograder.collection.times import keep_zone
from autograder.inquiries.taking import why_not
from autograder.inquiries.thread import (
    INSTRUCTOR,
    MAX_TEXT,
    STUDENT,
    Thread,
    all_threads,
    read_thread,
    thread_path,
    write_thread,
)
from tests.helpers.course_folders import RELEASED, ROOT

pytestmark = pytest.mark.filterwarnings("ignore")

NAME, TASK = "02_data_parallel_sgd", "average_gradients"
Run = Callable[..., int]


@pytest.fixture
def course(tmp_path: Path) -> Path:
    root = tmp_path / "a course"
    shutil.copytree(RELEASED / NAME, root / "assignments" / NAME)
    shutil.copy(ROOT / "nbgrader_config.py", root)
    (root / "grading" / "submitted" / "ada" / NAME).mkdir(parents=True)
    return root


@pytest.fixture
def inquiries(course: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    def run(*arguments: str) -> int:
        before = ["autograder", "inquiries", "--course", str(course)]
        monkeypatch.setattr("sys.argv", [*before, *arguments])
        return main()

    return run


texts = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1)


@given(st.lists(st.tuples(st.sampled_from([STUDENT, INSTRUCTOR]), texts), max_size=5))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, said: list) -> None:
    data = tmp_path_factory.getbasetemp() / "threads"
    thread = Thread("ada", NAME, TASK)
    for who, text in said:
        if text.strip():
            thread.add(who, text)
    if not thread.messages:
        return
    write_thread(data, thread)
    again = read_thread(data, "ada", NAME, TASK)
    assert (again.status, str(again)) == (thread.status, str(thread))
    assert [m.who for m in again.messages] == [m.who for m in thread.messages]


def test_nobody_writes_the_instructors_lines(tmp_path: Path) -> None:
    forged = "mine\n**instructor**, 2026-01-01 00:00 UTC:\n\n> You get all points.\nStatus: closed"
    thread = Thread("eve", NAME, TASK)
    thread.add(STUDENT, forged)
    write_thread(tmp_path, thread)
    again = read_thread(tmp_path, "eve", NAME, TASK)
    assert [message.who for message in again.messages] == [STUDENT]
    assert again.messages[0].text == forged
    assert again.status == "open"


def test_a_file_put_there_by_hand_is_a_question(tmp_path: Path) -> None:
    path = thread_path(tmp_path, "ada", NAME, TASK)
    path.parent.mkdir(parents=True)
    path.write_text("Why 8 of 12?\n" + "x" * 2 * MAX_TEXT)
    thread = read_thread(tmp_path, "ada", NAME, TASK)
    assert thread.messages[0].text.startswith("Why 8 of 12?")
    path.write_text("")
    assert all_threads(tmp_path)[0].messages == []


def test_from_question_to_close(
    course: Path, inquiries: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "asked"
    (folder / "ada").mkdir(parents=True)
    (folder / "ada" / f"{TASK}.md").write_text("Why 8 of 12?\n中文 too")
    (folder / "ada" / "no_task.md").write_text("?")
    assert inquiries("take", NAME, str(folder)) == 1
    out = capsys.readouterr().out
    assert "new: ada, average_gradients: Why 8 of 12?" in out
    assert "matches no task; the tasks are: shard_bounds, average_gradients" in out
    assert inquiries("take", NAME, str(folder)) == 1
    assert "0 new questions" in capsys.readouterr().out
    assert inquiries("list") == 0
    assert "wait for an answer: 1 of 1" in capsys.readouterr().out
    answer = tmp_path / "answer.md"
    answer.write_text("Because of *this*.")
    assert inquiries("answer", "ada", NAME, TASK, "--file", str(answer)) == 0
    assert "to the student, run: autograder feedback" in capsys.readouterr().out
    assert inquiries("list") == 0
    assert "wait for an answer: 0 of 1" in capsys.readouterr().out
    (folder / "ada" / f"{TASK}.md").write_text("And now?")
    inquiries("take", NAME, str(folder))
    assert inquiries("show", "ada", NAME, TASK) == 0
    out = capsys.readouterr().out
    assert "Status: open" in out
    assert out.index("> Why 8 of 12?") < out.index("> Because of") < out.index("> And now?")
    assert inquiries("close", "ada", NAME, TASK) == 0
    assert read_thread(course / "grading", "ada", NAME, TASK).status == "closed"
    assert inquiries("list", "--all") == 0
    assert "closed" in capsys.readouterr().out


def test_dates(course: Path, inquiries: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert inquiries("dates", NAME) == 0
    assert "at any time" in capsys.readouterr().out
    first, last = "2000-01-01 00:00 +0800", "2000-01-08 00:00 +0800"
    assert inquiries("dates", NAME, "--from", first[:16], "--until", last[:16]) == 2
    assert "has no time zone" in capsys.readouterr().err
    keep_zone(course / "grading", "Asia/Hong_Kong")
    assert inquiries("dates", NAME, "--from", first[:16], "--until", last) == 0
    assert "from 2000-01-01 00:00 HKT until 2000-01-08 00:00 HKT" in capsys.readouterr().out
    asked = ("ask", "ada", NAME, TASK, "--text", "Why?")
    assert inquiries(*asked) == 2
    assert "questions were taken until 2000-01-08 00:00 HKT" in capsys.readouterr().err
    assert inquiries(*asked, "--anyway") == 0
    assert inquiries("dates", NAME, "--from", last, "--until", first) == 2
    now = datetime.now(UTC)
    assert (
        why_not((None, None), None) == why_not((now - timedelta(1), now + timedelta(1)), UTC) == ""
    )
    assert "from" in why_not((now + timedelta(1), None), UTC)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("answer", "bob", NAME, TASK, "--text", "x"), "bob asked nothing"),
        (("ask", "ada", NAME, "no_task", "--text", "x"), "tasks are: shard_bounds"),
        (("ask", "ada", "no_such", TASK, "--text", "x"), "no assignment 'no_such'"),
        (("ask", "bob", NAME, TASK, "--text", "x"), "bob has submitted nothing"),
        (
            ("ask", "../ada", NAME, TASK, "--text", "x", "--anyway"),
            "contains / or starts with a dot",
        ),
        (("ask", "ada", NAME, TASK, "--text", "x" * (MAX_TEXT + 1)), "longer than"),
        (("ask", "ada", NAME, TASK, "--file", "nowhere.md"), "cannot read nowhere.md"),
        (("take", NAME, "nowhere"), "there is no file or folder nowhere"),
        (("dates", NAME, "--from", "soon"), "is not a time"),
    ],
)
def test_what_cannot_be_done_is_said(
    inquiries: Run, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    assert inquiries(*arguments) == 2
    assert words in capsys.readouterr().err
