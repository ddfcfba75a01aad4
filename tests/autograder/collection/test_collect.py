"""Sources as the systems write them, and as attackers do: which files are taken, and which not."""

from __future__ import annotations

import csv
import os
import pwd
import shutil
import stat
import time
import zipfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nbformat
import pytest

from autograder.collection import collecting
from autograder.collection.collecting import Collected, collect
from autograder.collection.listing import SourceError, list_source
from autograder.collection.repair import MAX_FILE
from autograder.collection.roster import read_roster
from autograder.collection.times import gradebook_due, read_time
from autograder.course import load_config
from tests.helpers.course_folders import RELEASED, ROOT

pytestmark = pytest.mark.filterwarnings("ignore")

ASSIGNMENT = "02_data_parallel_sgd"
FILE = f"{ASSIGNMENT}.ipynb"
MOODLE = "Ada Lovelace_12345_assignsubmission_file"


def notebook(text: str = "x = 1") -> bytes:
    cell = nbformat.v4.new_code_cell(text, id="a")
    return nbformat.writes(nbformat.v4.new_notebook(cells=[cell])).encode()


def solved() -> nbformat.NotebookNode:
    notebook = nbformat.read(RELEASED / ASSIGNMENT / FILE, as_version=4)
    for cell in notebook.cells:
        if cell.metadata.get("nbgrader", {}).get("grade_id") == "write_shard_bounds":
            cell.source = "def shard_bounds(length, world_size, rank):\n    return 42, 43"
    return notebook


UNTOUCHED = (RELEASED / ASSIGNMENT / FILE).read_bytes()
SOLVED = nbformat.writes(solved()).encode()


@pytest.fixture
def course(tmp_path: Path) -> Path:
    root = tmp_path / "a course"
    (root / "assignments" / ASSIGNMENT).mkdir(parents=True)
    shutil.copy(RELEASED / ASSIGNMENT / FILE, root / "assignments" / ASSIGNMENT)
    shutil.copy(ROOT / "nbgrader_config.py", root)
    return root


def zipped(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def folder_of(path: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def hand_in(exchange: Path, student: str, day: int, text: str) -> Path:
    """Write what nbgrader's `submit` writes on this day of November."""
    files = {FILE: notebook(text), "submission_secret.txt": f"{student}, {day}".encode()}
    folder = exchange / "inbound" / f"{student}+{ASSIGNMENT}+2026-11-{day} 09:00:00 UTC+{day}"
    return folder_of(folder, files)


def collect_files(course: Path, files: dict[str, bytes], **options: Any) -> Collected:
    source = zipped(course.parent / "export.zip", files)
    return collect(course, ASSIGNMENT, str(source), **options)


def submitted(course: Path) -> dict[str, str]:
    """Return student → source of the only cell."""
    folder = course / "grading" / "submitted"
    return {
        path.parts[-3]: nbformat.read(path, as_version=4).cells[0].source
        for path in sorted(folder.glob(f"*/{ASSIGNMENT}/{FILE}"))
    }


def why(collected: Collected) -> str:
    return "\n".join(f"{refusal.path} {refusal.reason}" for refusal in collected.refused)


@pytest.mark.parametrize("separator", ["/", "_/", "_"])
def test_moodle(course: Path, separator: str) -> None:
    """New versions, versions up to 3.x, and without folders."""
    files = {
        f"{MOODLE}{separator}{FILE}": notebook("ada"),
        f"王小明_678_assignsubmission_file{separator}{FILE}": notebook("ming"),
        "王小明_678_assignsubmission_onlinetext_onlinetext.html": b"<p>hello",
    }
    collected = collect_files(course, files)
    assert collected.format == "moodle"
    assert submitted(course) == {"AdaLovelace-12345": "ada", "王小明-678": "ming"}
    assert "typed into Moodle" in why(collected)


def test_gradescope(course: Path) -> None:
    """A group's submission counts for each of them; what a student printed counts for nobody."""
    listed = """\
submission_71:
  :submitters:
  - :name: Ada Lovelace
    :sid: '20001'
    :email: ada@x.org
  :created_at: 2026-11-20 17:34:00.861687000 Z
  :score: 2.0
  :results: !ruby/hash:Some::Class
    output: |-
      submission_71:
        :submitters:
        - :name: Eve
submission_72:
  :submitters:
  - :name: Bob de Vries
    :sid: ''
    :email: bob@x.org
  - :name: 王小明
    :sid: '20003'
  :score: 10.0
submission_73:
  :submitters: []
"""
    top = "assignment_9_export"
    files = {f"{top}/submission_{n}/{FILE}": notebook(f"{n}") for n in (71, 72, 73, 74)}
    files[f"{top}/submission_metadata.yml"] = listed.encode()
    collected = collect_files(course, files)
    assert collected.format == "gradescope"
    expected = {"AdaLovelace-20001": "71", "BobdeVries-bob": "72", "王小明-20003": "72"}
    assert submitted(course) == expected
    times = {row.student: row.time for row in collected.rows}
    assert times["AdaLovelace-20001"] == datetime(2026, 11, 20, 17, 34, 0, 861687, tzinfo=UTC)
    assert times["BobdeVries-bob"] is None
    assert why(collected).count("without a submitter in submission_metadata.yml") == 2


def test_canvas(course: Path, tmp_path: Path) -> None:
    export = tmp_path / "grades.csv"
    export.write_text(
        "Student,ID,SIS User ID,SIS Login ID,Section,Homework 2 (77)\n"
        "    Points Possible,,,,,12\n"
        '"Lovelace, Ada",340934,S1,ada,L1,\n"Hopper, Grace",334244,S2,grace,L1,\n'
        '"王, 小明",5,S3,ming,L1,\n'
    )
    files = {
        f"lovelaceada_340934_1_{FILE}": notebook("first"),
        f"lovelaceada_340934_2_{ASSIGNMENT}-1.ipynb": notebook("second"),
        f"hoppergrace_LATE_334244_9_{ASSIGNMENT}-2.ipynb": notebook("late"),
        "王小明_5_7_my work.ipynb": notebook("中文"),
        "stranger_99_8_x.ipynb": notebook("?"),
        "lovelaceada_340934_text.html": b"hi",
    }
    collected = collect_files(course, files, roster=export, due=read_time("2026-11-20 23:59 +0800"))
    assert collected.format == "canvas"
    assert submitted(course) == {"ada": "second", "grace": "late", "ming": "中文"}
    assert {row.student: row.late for row in collected.rows} == {"ada": 0, "grace": 1, "ming": 0}
    assert "not in the class list" in why(collected)
    assert "typed into Canvas" in why(collected)
    assert "my work.ipynb' was used as 02" in str(collected.rows)
    stamps = [p.parts[-3] for p in (course / "grading").rglob("timestamp.txt")]
    assert stamps == ["grace"], "Canvas says no time; nobody is late by a guess"


def test_the_exchange(course: Path, tmp_path: Path) -> None:
    """As nbgrader's `submit` writes it; the latest counts, the earlier is kept."""
    files = {"ada+01_minibatch_sgd+2026-11-20 10:00:00.0 UTC/01_minibatch_sgd.ipynb": notebook()}
    for clock, text in (("09:00", "first"), ("11:00", "last"), ("10:00", "second")):
        name = f"a+b+{ASSIGNMENT}+2026-11-20 {clock}:00.123456 UTC+cafe"
        files[f"{name}/{FILE}"] = notebook(text)
        files[f"{name}/timestamp.txt"] = b"1999-01-01 00:00:00 UTC"
    folder_of(tmp_path / "exchange" / "sgd-to-ddp" / "inbound", files)
    source = str(tmp_path / "exchange")
    collected = collect(course, ASSIGNMENT, source, format="exchange")
    assert submitted(course) == {"a+b": "last"}
    assert collected.rows[-1].time == datetime(2026, 11, 20, 11, 0, 0, 123456, tzinfo=UTC)
    assert len(list((course / "grading/earlier/a+b" / ASSIGNMENT).iterdir())) == 2
    with pytest.raises(SourceError, match="no exchange"):
        collect(course, ASSIGNMENT, str(course), format="exchange")


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_ino)
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".csv"
    }


def test_twice_is_once_and_a_newer_one_replaces(course: Path, tmp_path: Path) -> None:
    first = str(zipped(tmp_path / "1.zip", {f"{MOODLE}/{FILE}": notebook("first")}))
    second = str(zipped(tmp_path / "2.zip", {f"{MOODLE}/{FILE}": notebook("second")}))
    collect(course, ASSIGNMENT, first)
    before = snapshot(course / "grading")
    assert [row.action for row in collect(course, ASSIGNMENT, first).rows] == ["unchanged"]
    assert snapshot(course / "grading") == before

    # Grading repairs damaged notebooks in place: the same source is the same all the same.
    (path,) = (course / "grading/submitted").glob(f"*/*/{FILE}")
    path.write_bytes(notebook("first, repaired"))
    assert [row.action for row in collect(course, ASSIGNMENT, first).rows] == ["unchanged"]
    (row,) = collect(course, ASSIGNMENT, second).rows
    assert row.action == "taken, newer"
    assert submitted(course) == {"AdaLovelace-12345": "second"}
    (earlier,) = (course / "grading/earlier").rglob(FILE)
    assert earlier.read_bytes() == notebook("first, repaired")
    (row,) = collect(course, ASSIGNMENT, first).rows
    assert row.action == "kept aside, older"
    assert submitted(course) == {"AdaLovelace-12345": "second"}
    assert not list(course.rglob("collecting-*"))


def test_a_hostile_zip(course: Path, tmp_path: Path) -> None:
    inner = {FILE: notebook("inner"), "again.zip": b"PK\5\6" + bytes(18)}
    inner |= {"bomb.txt": bytes(MAX_FILE + 1), "../../../outside.txt": b"out"}
    inner |= {"a.txt": b"a file", "a.txt/b.txt": b"and a folder of its name"}
    files = {
        f"{MOODLE}/work.zip": zipped(tmp_path / "work.zip", inner).read_bytes(),
        f"{MOODLE}/page.html": b"<script>1</script>",
        f"{MOODLE}/pic.svg": b"<svg/>",
        f"{MOODLE}/timestamp.txt": b"1999-01-01 00:00:00 UTC",
        f"{MOODLE}/\u202etxt.exe": b"turned",
        f"{MOODLE}/../../../../evil.ipynb": notebook("evil"),
        "/etc/cron.d/evil": b"x",
        f"Eve_6_assignsubmission_file/{FILE}": bytes(60 * 2**20),
        f"Nul_7_assignsubmission_file/{FILE}": notebook("seven"),
    }
    source = zipped(tmp_path / "m.zip", files)
    link = zipfile.ZipInfo(f"{MOODLE}/secret.txt")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(source, "a") as archive:
        archive.writestr(link, "/etc/passwd")
    before = {path for path in tmp_path.rglob("*") if "grading" not in path.parts}
    collected = collect(course, ASSIGNMENT, str(source))
    assert submitted(course) == {"AdaLovelace-12345": "inner", "Nul-7": "seven"}
    refusals = why(collected)
    for word in (
        *("again.zip is an archive", "bomb.txt is larger than", "secret.txt is a link"),
        *("same name as a folder", ".html", ".svg", "timestamp.txt was written by"),
        *("control characters", "outside", "evil", "contains no notebook"),
    ):
        assert word in refusals, (word, refusals)
    after = {path for path in tmp_path.rglob("*") if "grading" not in path.parts}
    assert after == before, "nothing lies anywhere else"
    folder = course / "grading/submitted/AdaLovelace-12345" / ASSIGNMENT
    assert sorted(path.name for path in folder.iterdir()) == [FILE, "a.txt"]


def test_links_and_pipes_in_a_folder(course: Path, tmp_path: Path) -> None:
    files = {f"{name}/{FILE}": notebook(name) for name in ("ada", "eve")}
    folder = folder_of(tmp_path / "in", files)
    (folder / "ada" / "hidden.py").symlink_to(ROOT / "nbgrader_config.py")
    (folder / "ada" / "all").symlink_to("/")
    os.mkfifo(folder / "ada" / "pipe.txt")
    (folder / "eve" / FILE).unlink()
    (folder / "eve" / FILE).symlink_to(folder / "ada" / FILE)
    collected = collect(course, ASSIGNMENT, str(folder))
    assert submitted(course) == {"ada": "ada"}
    assert why(collected).count("is a link") == 3
    assert "pipe.txt is not an ordinary file" in why(collected)


@pytest.mark.parametrize("encoding", ["utf-8", "gbk", "cp437"])
def test_names_that_a_zip_does_not_say_the_encoding_of(tmp_path: Path, encoding: str) -> None:
    name = "王小明" if encoding != "cp437" else "José Ñandú"
    raw = f"{name}.ipynb".encode(encoding)
    path = zipped(tmp_path / "z.zip", {"x" * len(raw): b"{}"})
    path.write_bytes(path.read_bytes().replace(b"x" * len(raw), raw))
    assert [entry.path for entry in list_source(path)] == [f"{name}.ipynb"]


@pytest.mark.parametrize(
    ("data", "note"),
    [
        (b'{"cells": [', "is not JSON: grading uses an empty notebook instead"),
        (SOLVED[:-700], "cells can be read: grading uses the part that can be read"),
    ],
)
def test_damaged_notebooks_are_taken_and_named(course: Path, data: bytes, note: str) -> None:
    (row,) = collect_files(course, {f"{MOODLE}/{FILE}": data}).rows
    assert note in row.notes
    (path,) = (course / "grading/submitted").glob(f"*/*/{FILE}")
    assert path.read_bytes() == data


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "no column of student ids"),
        ("student_id,name\nada,A\nada,B\n", "in the list twice, and the two lines differ"),
        ("student_id\n../ada\n", "cannot be a student id"),
        ("student_id\n", "a header but no students: add one line per student"),
        ("", "is empty"),
        ("student_id,system_id\nada,5\nbob,5\n", "bob has the number 5, as ada has"),
        ("student_id,name,name\nada,A,B\n", "two columns 'name'"),
    ],
)
def test_bad_class_lists(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "r.csv"
    path.write_text(text)
    with pytest.raises(SourceError, match=message):
        read_roster(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("23:59", "not a complete date"),
        ("2026-11-20", "not a complete date"),
        ("2026-11-20 23:59 XYZT", "not known"),
        ("yesterday evening", "is not a time"),
        ("2026-11-20 23:59", "no time zone"),
    ],
)
def test_a_time_is_never_invented(text: str, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        read_time(text)


def test_a_student_with_a_deadline_of_their_own(course: Path, tmp_path: Path) -> None:
    sheet = tmp_path / "sheet.csv"
    sheet.write_text(
        "student_id,submitted_at\nada,2026-11-21 10:00 UTC\nming,2026-11-21 10:00 UTC\n"
    )
    folder = folder_of(tmp_path / "in", {"ada.ipynb": notebook(), "ming.ipynb": notebook()})
    extensions = course / "grading/extensions.csv"
    extensions.parent.mkdir(exist_ok=True)
    text = f"assignment,student_id,until\n{ASSIGNMENT},ada,2026-11-22 09:00 UTC\nother,ming,never\n"
    extensions.write_text(text)
    due = read_time("2026-11-20 10:00 UTC")
    rows = collect(course, ASSIGNMENT, str(folder), roster=sheet, due=due).rows
    assert [row.late for row in rows] == [0, 1]
    extensions.write_text(text.replace("2026-11-22 09:00 UTC", "soon"))
    with pytest.raises(SourceError, match="line 2: 'soon' is not a time"):
        collect(course, ASSIGNMENT, str(folder), roster=sheet, due=due)
    extensions.write_text("assignment,student_id\n")
    with pytest.raises(SourceError, match="no column until"):
        collect(course, ASSIGNMENT, str(folder), roster=sheet, due=due)


def test_the_command(course: Path, tmp_path: Path, autograder: Any, monkeypatch: Any) -> None:
    """The class's folder may lie outside the course."""
    data = tmp_path / "elsewhere"
    monkeypatch.setenv("GRADING", str(data))
    files = {f"ada/{FILE}": notebook(), "ada.exe": b"MZ", "bob/notes.txt": b"no notebook"}
    files["ada/timestamp.txt"] = b"2026-11-20 10:00:00 UTC"
    folder = folder_of(tmp_path / "in", files)
    due = "2000-01-01 10:00 UTC"
    collecting = ("collect", ASSIGNMENT, str(folder))
    status, output = autograder(course, *collecting, "--due", due)
    assert status == 1 and "1 taken; 1 late; 1 submission and 1 file refused" in output
    assert "next: autograder grade" in output
    assert (data / "submitted/ada" / ASSIGNMENT / FILE).is_file()
    with (data / "collected" / f"{ASSIGNMENT}.csv").open(encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    assert int(rows[0]["days late"]) > 9000
    assert gradebook_due(load_config(course), ASSIGNMENT) == read_time(due)
    status, output = autograder(course, *collecting)
    assert status == 1, "a submission was refused"
    assert "1 unchanged; 1 late" in output, "the gradebook's deadline"
    status, output = autograder(course, "collect", ASSIGNMENT, "nowhere")
    assert status == 2 and "there is no file or folder nowhere" in output
    assert autograder(course, *collecting, "--due", "soon")[0] == 2


@pytest.mark.parametrize(
    "name",
    [
        *(f"{ASSIGNMENT}-Copy1.ipynb", f"Copy of {ASSIGNMENT}.ipynb", f"{ASSIGNMENT} (1).ipynb"),
        *("my solution.ipynb", f"{FILE}.txt"),
    ],
)
def test_of_two_notebooks_the_solved_one_counts_and_the_other_is_named(course, tmp_path, name):
    for solved_one, untouched in ((name, FILE), (FILE, name)):
        files = {f"ada/{solved_one}": SOLVED, f"ada/{untouched}": UNTOUCHED}
        source = folder_of(tmp_path / "in" / solved_one, files)
        collected = collect(course, ASSIGNMENT, str(source))
        (row,) = collected.rows
        (path,) = (course / "grading/submitted").glob(f"*/*/{FILE}")
        assert b"return 42, 43" in path.read_bytes(), row.notes
        assert f"ignored: '{untouched}'" in row.notes and not why(collected)
        shutil.rmtree(course / "grading")


def test_a_file_that_is_no_notebook_of_this_assignment_is_named(course, tmp_path):
    files = {
        **{f"lecture/{FILE}": notebook("a lecture"), f"helper/{FILE}": SOLVED},
        **{f"data/{FILE}": SOLVED, "helper/helpers.py": b"x = 1", "data/data.json": b"{}"},
    }
    source = folder_of(tmp_path / "in", files)
    rows = {row.student: row for row in collect(course, ASSIGNMENT, str(source)).rows}
    assert "has none of this assignment's tasks" in rows["lecture"].notes
    assert "'helpers.py' is not there when the notebook is graded" in rows["helper"].notes
    assert "'data.json' is not there" in rows["data"].notes


def test_names_of_people_everywhere(course: Path, tmp_path: Path) -> None:
    people = ["Jose\u0301", "अदिति", "วิชัย", "José Núñez", "Lovelace, Ada", "O'Brien", "OBrien"]
    source = folder_of(tmp_path / "in", {f"{name}/{FILE}": notebook(name) for name in people})
    collected = collect(course, ASSIGNMENT, str(source))
    assert {row.student for row in collected.rows} == {
        *("José", "अदिति", "วิชัย", "JoséNúñez", "LovelaceAda", "OBrien")
    }
    assert "rename one" in why(collected), "two folders with one id"
    roster = tmp_path / "r.csv"
    roster.write_text("student_id,name\nS1234567,José\nada,Ada Lovelace\nADA,Ada Byron\n")
    students = read_roster(roster)
    assert students.find("s1234567", "") is students.students["S1234567"]
    assert students.find("Ada", "") is None, "two would fit"
    assert students.find("?", "José") is students.students["S1234567"]
    roster.write_text("student_id\nobrien\n")
    assert read_roster(roster).find("O’Brien", "O’Brien") is not None
    roster.write_text("student_id\nO'Brien\n")
    with pytest.raises(SourceError, match="for example OBrien"):
        read_roster(roster)


def test_two_persons_are_never_one(course: Path, tmp_path: Path) -> None:
    roster = tmp_path / "r.csv"
    roster.write_text("student_id,system_id,name\n77,5,Lee Scott\nann,6,Ann Alee\njo,,José Ng\n")
    students = read_roster(roster)
    for name in ("Elle Tocs", "Anna Lee", "Jose Ng"):
        assert students.find("?", name) is None, name
    for name in ("SCOTT, Lee", "scottlee", "Jose\u0301 Ng", "NG, José"):
        assert students.find("?", name), name
    files = {
        f"{name}_{number}_assignsubmission_file/{FILE}": notebook(name)
        for name, number in (("Scott Lee", 8), ("Who Else", 77), ("Ng José", 9), ("José Ng", 10))
    }
    collected = collect_files(course, files, roster=roster)
    rows = {row.student: row for row in collected.rows}
    assert rows.keys() == {"77", "jo"} and rows["jo"].name == "José Ng"
    assert "'Scott Lee' counts as Lee Scott of the class list" in rows["77"].notes
    assert "counts as" not in rows["jo"].notes
    assert {refusal.student for refusal in collected.refused} == {"Who Else", "Ng José"}


CLASS = """student_id,system_id,name,group,section
ada,1,Ada,red,L1
bob,2,Bob,red,L1
eve,3,Eve,red,L1
eve,3,Eve,red,L2
kim,4,Kim,,L1
"""


def test_one_submission_of_a_group_counts_for_all(course: Path, tmp_path: Path) -> None:
    """The latest of all members', for whom each has a place of their own; the table says whose."""
    (tmp_path / "r.csv").write_text(CLASS)
    options = {"roster": tmp_path / "r.csv", "due": read_time("2026-11-20 10:00 UTC")}

    def handed_in(student: str, day: int, text: str) -> dict[str, tuple[str, int]]:
        hand_in(tmp_path / "x", student, day, text)
        collected = collect(course, ASSIGNMENT, str(tmp_path / "x"), format="exchange", **options)
        assert not collected.refused
        taken = [row for row in collected.rows if not row.action.startswith("kept aside")]
        assert [row.student for row in taken] == sorted(submitted(course)), "one line for each"
        by = [row.notes.partition("handed in by ")[2].partition(",")[0] for row in taken]
        return {row.student: (who, row.late) for who, row in zip(by, taken, strict=True)}

    alone = {"kim": ("", 0)}
    assert handed_in("kim", 19, "K") == alone
    of_ada = {"ada": ("", 0), "bob": ("ada", 0), "eve": ("ada", 0)}
    assert handed_in("ada", 19, "A") == of_ada | alone
    assert submitted(course) == {**dict.fromkeys(("ada", "bob", "eve"), "A"), "kim": "K"}
    secrets = [path.parts[-3] for path in course.rglob("submission_secret.txt")]
    assert sorted(secrets) == ["ada", "kim"], "nbgrader would give two students one page"
    late = {"ada": ("eve", 1), "bob": ("eve", 1), "eve": ("", 1)}
    assert handed_in("eve", 21, "E") == late | alone
    assert submitted(course) == {**dict.fromkeys(("ada", "bob", "eve"), "E"), "kim": "K"}
    of_bob = {"ada": ("bob", 0), "bob": ("", 0), "eve": ("bob", 0)}
    assert handed_in("bob", 22, "A") == of_bob | alone


def test_what_moodles_worksheet_says_of_a_submission(course: Path, tmp_path: Path) -> None:
    """A draft is told. Its groups are not read: it has a file, and words, for everybody."""
    (tmp_path / "w.csv").write_text(
        "Identifier,Full name,ID number,Status,Group\n"
        "Participant 12345,Ada Lovelace,ada,Draft (not submitted) - ,Not a member of any group\n"
        "Participant 678,Ming,ming,Submitted for grading - ,Not a member of any group\n"
    )
    files = {f"{MOODLE}/{FILE}": notebook(), f"Ming_678_assignsubmission_file/{FILE}": notebook()}
    collected = collect_files(course, files, roster=tmp_path / "w.csv")
    notes = {row.student: row.notes for row in collected.rows}
    assert "as a draft, which was not submitted" in notes["ada"] and "draft" not in notes["ming"]
    assert "handed in by" not in str(notes)


def test_a_group_whose_times_are_unknown_is_told(course: Path, tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_text(CLASS)
    file = f"_assignsubmission_file/{FILE}"
    for other, told in ((notebook("B"), 3), (notebook("A"), 0)):
        files = {f"Ada_1{file}": notebook("A"), f"Bob_2{file}": other}
        rows = collect_files(course, files, roster=tmp_path / "r.csv").rows
        assert str(rows).count("and no time says which are later") == told


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252", "gb18030"])
def test_a_class_list_is_read_in_any_encoding(tmp_path: Path, encoding: str) -> None:
    names = ["Éléonore Müller", "Größmann", "Åsa Öz", "Zoë"]
    if encoding.startswith(("utf", "gb")):
        names = ["王小明", "李 Tom", "欧阳娜娜"]
    text = "student_id\tname\n" + "".join(f"s{i}\t{name}\n" for i, name in enumerate(names))
    (tmp_path / "r.csv").write_bytes(text.encode(encoding))
    students = read_roster(tmp_path / "r.csv").students.values()
    assert [student.name for student in students] == names


def test_the_same_handed_in_again_late_costs_no_day(course: Path, tmp_path: Path) -> None:
    exchange, due = tmp_path / "x", datetime(2026, 11, 20, tzinfo=UTC)

    def now() -> tuple[str, int]:
        rows = collect(course, ASSIGNMENT, str(exchange), format="exchange", due=due).rows
        return submitted(course)["ada"], rows[-1].late

    hand_in(exchange, "ada", 19, "first")
    hand_in(exchange, "ada", 21, "first")
    assert now() == ("first", 0)
    hand_in(exchange, "ada", 22, "second")
    assert now() == ("second", 3)
    hand_in(exchange, "ada", 23, "first")
    assert now() == ("first", 0)
    assert now() == ("first", 0)


def test_an_exchange_submission_that_somebody_else_wrote_is_refused(course, tmp_path, monkeypatch):
    owners = {
        hand_in(tmp_path / "x", "ada+1", day, owner): owner
        for day, owner in enumerate(("Ada+1", "eve", "account 1001"), 19)
    }
    (lost := tmp_path / "x/inbound/lost+found").mkdir()
    owners[lost] = "root"
    with monkeypatch.context() as patch:
        patch.setattr(collecting, "owner_of", owners.__getitem__)
        collected = collect(course, ASSIGNMENT, str(tmp_path / "x"), format="exchange")
    assert submitted(course) == {"ada+1": "Ada+1"}
    for owner in ("eve", "account 1001"):
        assert f"belongs to {owner}, not to this student" in why(collected)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    assert collecting.owner_of(tmp_path) == f"account {os.geteuid()}", "its number may be an id"


def test_a_zip_of_thousands_of_files_takes_a_second_and_keeps_its_notebook(course, tmp_path):
    files = {f"a/{number:04}.txt": b"x" for number in range(5000)}
    inner = zipped(tmp_path / "work.zip", {**files, f"z/{FILE}": SOLVED})
    start = time.process_time()
    collected = collect_files(course, {f"{MOODLE}/work.zip": inner.read_bytes()})
    assert time.process_time() - start < 20
    (row,) = collected.rows
    assert "work.zip has 5001 files; 400 were looked at" in row.notes
    assert len(collected.refused) <= 21 and "more files were refused" in why(collected)
