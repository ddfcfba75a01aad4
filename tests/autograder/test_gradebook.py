"""One sentence reports a damaged, locked or closed gradebook, before anything is graded."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from autograder import gradebook
from autograder.errors import CommandFailed
from autograder.gradebook import make_sure_of
from tests.helpers import ROOT

# Commands that open the gradebook.
COMMANDS = ["status", "export", "grade one", "regrade one --all", "collect one .", "feedback one"]


@pytest.fixture
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A gradebook with some pages of content, in a course folder."""
    monkeypatch.setattr(gradebook, "_PATIENCE", 0.1)
    shutil.copy(ROOT / "nbgrader_config.py", tmp_path)
    path = tmp_path / "grading" / "gradebook.db"
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE grade (name TEXT PRIMARY KEY, points REAL)")
        rows = [(f"{number:05}" * 20, number) for number in range(2000)]
        database.executemany("INSERT INTO grade VALUES (?, ?)", rows)
        database.commit()
    return path


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "none": lambda content: b"this is no database\n" * 1000,
    "torn": lambda content: content[:8192] + bytes(16384) + content[24576:],  # as by a disk
    "cut": lambda content: content[:-20000],
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("writes", [True, False], ids=["writes", "reads"])
def test_damage_is_found(book: Path, kind: str, writes: bool) -> None:
    make_sure_of(f"sqlite:///{book}", writes=writes)
    book.write_bytes(DAMAGE[kind](book.read_bytes()))
    with pytest.raises(CommandFailed, match=r"is damaged .*Replace it by a backup") as raised:
        make_sure_of(f"sqlite:///{book}", writes=writes)
    assert str(book) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("writes", [True, False], ids=["writes", "reads"])
def test_a_lock_is_told(book: Path, writes: bool) -> None:
    with closing(sqlite3.connect(book, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(CommandFailed, match="another program is writing it"):
            make_sure_of(f"sqlite:///{book}", writes=writes)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_opens_it_says_so(book, command, autograder):
    book.write_bytes(DAMAGE["torn"](book.read_bytes()))
    name, *arguments = command.split()
    status, output = autograder(book.parents[1], name, *arguments)
    assert status == 2 and output.count("\n") == 1
    assert output.startswith(f"autograder {name}: the gradebook {book} is damaged")
