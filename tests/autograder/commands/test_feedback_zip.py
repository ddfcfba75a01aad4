"""Pages go back to Moodle and Canvas under names by which these find the student."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
from nbgrader.exchange.default import Exchange

from autograder.commands import feedback
from autograder.commands.feedback import pack
from autograder.course import load_config
from tests.helpers.course_folders import ROOT

ASSIGNMENT = "02_data_parallel_sgd"
MOODLE = [
    "Ada Lovelace_12345_assignsubmission_file/hw.ipynb",
    "Bob de Vries_777_assignsubmission_file/02.ipynb",
    "Eve_9_assignsubmission_file/hw.ipynb",
]
CANVAS = [
    "lovelaceada_LATE_12345_208490284_hw.ipynb",
    "lovelaceada_12345_208490300_hw-1.ipynb",
    "devriesbob_777_208490285_my_hw.ipynb",
]
ROSTER = "student_id,system_id,name\nada,12345,Ada Lovelace\nbob,777,Bob de Vries\neve,9,Eve\n"


@pytest.fixture
def course(tmp_path: Path) -> Path:
    """A course in which Ada and Bob have pages, and Eve has none."""
    shutil.copy(ROOT / "nbgrader_config.py", tmp_path)
    (tmp_path / "assignments" / ASSIGNMENT).mkdir(parents=True)
    data = tmp_path / "grading"
    for student in ("ada", "bob"):
        page = data / "feedback" / student / ASSIGNMENT / f"{ASSIGNMENT}.html"
        page.parent.mkdir(parents=True)
        page.write_text(f"for {student}", encoding="utf-8")
    (data / "roster.csv").write_text(ROSTER, encoding="utf-8")
    return tmp_path


def packed(course: Path, names: list[str], system: str) -> dict[str, str]:
    submissions = course / "submissions.zip"
    with zipfile.ZipFile(submissions, "w") as archive:
        for name in names:
            archive.writestr(name, "{}")
    pack(course, ASSIGNMENT, str(submissions))
    with zipfile.ZipFile(course / "grading/feedback" / f"{ASSIGNMENT}_for_{system}.zip") as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


def moodle_finds(name: str) -> tuple[int, str, str]:
    """The participant, the plugin and the file, as Moodle's importer reads a name."""
    folder, _, file = name.partition("/")
    _, participant, kind, plugin, remainder = [*folder.split("_", 4), ""][:5]
    assert remainder == ""
    return int(participant), f"{kind}_{plugin}", file


def canvas_finds(name: str) -> tuple[int, int]:
    """The user and one of their files: the first two parts that are numbers."""
    user, file = [int(part) for part in name.split("_") if part.isdigit()][:2]
    return user, file


def test_moodle_finds_each_student(course: Path, capsys: Any) -> None:
    pages = {moodle_finds(n): text for n, text in packed(course, MOODLE, "moodle").items()}
    assert "not in the zip, because they have no page: eve\n" in capsys.readouterr().out
    plugin = ("assignfeedback_file", f"feedback_{ASSIGNMENT}.html")
    assert pages == {(12345, *plugin): "for ada", (777, *plugin): "for bob"}


def test_canvas_finds_each_student_by_the_last_of_their_files(course: Path) -> None:
    contents = packed(course, CANVAS, "canvas")
    pages = {canvas_finds(name): text for name, text in contents.items()}
    assert pages == {(12345, 208490300): "for ada", (777, 208490285): "for bob"}
    assert all("/" not in name and name.endswith(".html") for name in contents)


def test_a_member_of_a_pair_who_submitted_nothing_is_named(course: Path, capsys: Any) -> None:
    """Bob's submission is a copy of Ada's: he has a page, and the system has no file of his."""
    assert list(packed(course, MOODLE[:1], "moodle").values()) == ["for ada"]
    assert "does not have them: bob\n" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")  # slips of nbgrader's own
def test_the_exchange_gets_the_pages_of_those_who_used_it(course, monkeypatch, capsys):
    """nbgrader's own command ends in a traceback for the whole class at the first other page."""
    monkeypatch.setattr(Exchange, "ensure_root", lambda self: None)
    config = load_config(course)
    config.Exchange.root = str(course / "exchange")
    monkeypatch.setattr(feedback, "load_config", lambda root: config)
    data = course / "grading/feedback"
    for name, text in (("submission_secret.txt", "s3cret"), ("timestamp.txt", "2026-11-20 UTC")):
        (data / "ada" / ASSIGNMENT / name).write_text(text)
    feedback.release(course, ASSIGNMENT, [])
    assert "submitted nothing: bob\n" in capsys.readouterr().out
    (page,) = (course / "exchange").rglob("*.html")
    assert page.read_text() == "for ada"
    (data / "ada" / ASSIGNMENT / f"{ASSIGNMENT}.html").write_text("more")
    feedback.release(course, ASSIGNMENT, [])
    assert page.read_text() == "more"
