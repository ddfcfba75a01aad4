"""Grades from nbgrader's own gradebook, in the columns that other systems read."""

from __future__ import annotations

import csv
import io
import re
import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from nbgrader.api import Gradebook

from autograder.course import load_config
from autograder.exporting.grades import extra_credit
from autograder.tables import safe_cell
from tests.helpers.course_folders import ROOT

pytestmark = pytest.mark.filterwarnings("ignore")

NAME = "02_data_parallel_sgd"
ROSTER = """student_id,system_id,name,first_name,last_name,email,section
ada,340934,Ada Lovelace,Ada,Lovelace,ada@x.org,L1
ming,678,王小明,小明,王,ming@x.org,L1
grace,9,=HYPERLINK(1),@Grace,-Hopper,+1@x.org,L2
nobody,10,No Body,No,Body,n@x.org,L2
"""


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ada has 9 of 12 less 2 for two days; Ming 0, to be read; Grace is not graded yet."""
    root = tmp_path_factory.mktemp("course")
    shutil.copy(ROOT / "nbgrader_config.py", root)
    config = load_config(root)
    (root / "grading/roster.csv").write_text(ROSTER, encoding="utf-8")
    (root / "grading/submitted/grace" / NAME).mkdir(parents=True)
    with Gradebook(config.CourseDirectory.db_url, "sgd-to-ddp") as book:
        for name, points in ((NAME, 9.0), ("03_collectives", 1.0)):
            book.add_assignment(name, duedate="2026-11-20 12:00:00")
            book.add_notebook(name, name)
            book.add_grade_cell("task", name, name, cell_type="code", max_score=points)
            book.add_grade_cell("words", name, name, cell_type="markdown", max_score=3)
        for student in ("ada", "ming", "late-comer"):
            book.add_student(student)
        late = datetime(2026, 11, 22, 9)
        book.add_submission(NAME, "ada", timestamp=late)
        book.add_submission(NAME, "ming")
        book.add_submission(NAME, "late-comer")  # and then nbgrader autograde was ended
        scores = (("ada", "task", 7), ("ada", "words", 2), ("ming", "task", 0))
        for student, cell_name, auto in scores:
            grade = book.find_grade(cell_name, NAME, NAME, student)
            grade.auto_score = auto
            grade.needs_manual_grade = False
        book.find_grade("words", NAME, NAME, "ming").needs_manual_grade = True
        book.find_submission_notebook(NAME, NAME, "ada").late_submission_penalty = 2
        book.db.commit()
    return root


Export = Callable[..., str]


@pytest.fixture
def export(course: Path, autograder: Any) -> Export:
    """Return a function that exports, and returns the CSV or what the command says instead."""

    def run(*arguments: str) -> str:
        status, output = autograder(course, "export", *arguments)
        assert status == 0 or output.startswith("autograder export: "), output
        to = re.search(r"^written: (.+)$", output, re.MULTILINE)
        return Path(to[1]).read_text(encoding="utf-8-sig") if to else output

    return run


def read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_plain_has_everything(export: Export) -> None:
    rows = {(r["assignment"], r["student_id"]): r for r in read(export())}
    assert len(rows) == 10, "five students, two assignments"
    ada = rows[NAME, "ada"]
    points = [float(ada[key]) for key in ("raw_score", "late_penalty", "score", "max_score")]
    assert points == [9, 2, 7, 12]
    assert (ada["days_late"], ada["status"]) == ("2", "graded")
    status = {r["student_id"]: r["status"] for name, r in rows.items() if name[0] == NAME}
    assert status == {
        **{"ada": "graded", "ming": "to be read", "grace": "not graded", "nobody": "missing"},
        "late-comer": "not in the class list",
    }
    assert rows[NAME, "late-comer"]["score"] == ""
    assert rows[NAME, "nobody"]["score"] == ""
    assert rows[NAME, "ming"]["name"] == "王小明"


def test_no_cell_is_a_formula(export: Export) -> None:
    text = export()
    cells = [cell for row in csv.reader(io.StringIO(text)) for cell in row]
    assert not [cell for cell in cells if cell[:1] in "=+@\t\r" and cell]
    assert "'=HYPERLINK(1)" in text and "'-Hopper" in text


def test_moodles_worksheet(export: Export, tmp_path: Path) -> None:
    worksheet = tmp_path / "w.csv"
    header = (
        "Identifier,Full name,ID number,Email address,Status,Grade,Maximum Grade,Marking workflow "
        "state,Grade can be changed,Last modified (submission),Last modified (grade),"
        "Feedback comments"
    )
    worksheet.write_text(
        f"{header}\nParticipant 340934,Ada,,ada@x.org,Submitted,,100.00,,Yes,"
        '"Sunday, 22 November 2026, 9:00 AM",-,\n'
        "Participant 5,Else,,else@x.org,,,100.00,,Yes,-,-,\n"
    )
    assert "has one assignment" in export("--fill", str(worksheet))
    text = export(NAME, "--fill", str(worksheet))
    assert text.partition("\n")[0] == header
    ada, other = read(text)
    assert float(ada["Grade"]) == pytest.approx(100 * 7 / 12, abs=0.01)
    assert other["Grade"] == ""
    assert ada["Last modified (grade)"] == "-"


CANVAS = """Student,ID,SIS User ID,SIS Login ID,Section,Retake of {n} (9),{n} (7),Other (8)
Points Possible,,,,,1,12,1
"Lovelace, Ada",1,,ADA@x.org,L1,,5,
"Ming",678,S2,?,L1,,,
"Else, Who",123,,adaline,L1,3,4,
"""
WORKSHEET = """Identifier,ID number,Email address,Grade,Maximum Grade,Last modified (grade)
Participant 340934,,,,-,-
Participant 9,,ming@y.org,,100,-
"""


@pytest.mark.parametrize(
    ("mark", "encoding"), [(",", "utf-8-sig"), (";", "cp1252"), ("\t", "utf-16")]
)
def test_only_what_is_equal_is_filled_in(export, tmp_path, mark, encoding):
    system_file = tmp_path / "own.csv"
    rows = csv.reader(io.StringIO(CANVAS.format(n=NAME).replace("Who", "Wér")))
    text = io.StringIO()
    csv.writer(text, delimiter=mark).writerows(rows)
    system_file.write_bytes(text.getvalue().encode(encoding))
    fill = ("--fill", str(system_file))
    header, _, ada, ming, other = csv.reader(io.StringIO(export(NAME, *fill)), delimiter=mark)
    assert (header[5:], float(ada[5]), float(ming[5])) == ([f"{NAME} (7)"], 7, 0), "address, number"
    assert (other[0], other[5]) == ("Else, Wér", "")
    assert f"{NAME} (7){mark}03_collectives" in export(*fill).partition("\n")[0]
    assert f"{mark}Other (8)\n" in export(NAME, *fill, "--title", "Other")
    system_file.write_text(WORKSHEET)
    ada_too, other_too = read(export(NAME, *fill))
    assert (ada_too["Grade"], other_too["Grade"]) == ("7", ""), "no maximum; another address"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("Other (8)", f"{NAME} (8)", "2 columns that may be"),
        ("123,,adaline", "340934,,x", "two lines for ada"),
        ("123,,adaline", "678,ada,x", "fits ming (ID 678) and ada (SIS User ID ada)"),
    ],
)
def test_what_is_ambiguous_is_refused(export, tmp_path, old, new, message):
    system_file = tmp_path / "own.csv"
    system_file.write_text(CANVAS.format(n=NAME).replace(old, new))
    assert message in export(NAME, "--fill", str(system_file))


def test_extra_credit_is_counted(course: Path, export: Export, tmp_path: Path) -> None:
    config = load_config(course)
    system_file = tmp_path / "own.csv"
    system_file.write_text(CANVAS.format(n=NAME))
    with Gradebook(config.CourseDirectory.db_url, "sgd-to-ddp") as book:
        grade = book.find_grade("task", NAME, NAME, "ada")
        grade.extra_credit = 4
        book.db.commit()
        try:
            text = export(NAME, "--fill", str(system_file))
            assert '"Lovelace, Ada",1,,ADA@x.org,L1,11' in text
            (row, *_) = read(export(NAME, "--tasks"))
            assert (float(row["score"]), float(row["task"])) == (11, 11)
            assert extra_credit(config, NAME) == [("ada", "task", 4)]
        finally:
            grade.extra_credit = None
            book.db.commit()


def test_no_csv_hides_a_formula() -> None:
    for text in ("＝1", "＋1", "－1", "＠x", "\ufeff=1", "\u200b\u00a0=1", "\u202e=1", "=1", "@x"):
        assert safe_cell(text).startswith("'"), text
    assert safe_cell("ａ=1") == "ａ=1" and safe_cell("-") == "-" and safe_cell(-1.5) == "-1.5"


def test_the_command(course: Path, tmp_path: Path, autograder: Any) -> None:
    status, output = autograder(course, "export")
    counts = "1 graded, 1 to be read, 1 not graded, 1 missing, 1 not in the class list"
    assert status == 0 and f"{counts}; with a late penalty: 1" in output
    assert (course / "grading/grades_plain.csv").read_bytes().startswith(b"\xef\xbb\xbf")
    (tmp_path / "nbgrader_config.py").write_bytes((ROOT / "nbgrader_config.py").read_bytes())
    for root, arguments, message in (
        (course, ["no_such"], "has no assignment 'no_such'; it has: "),
        (course, ["--fill", "x.csv"], "cannot read x.csv"),
        (course, ["--title", "x"], "--title needs one ASSIGNMENT"),
        (course, ["--fill", str(ROOT / "pyproject.toml")], "neither a grade export of Canvas"),
        (tmp_path, [], "no gradebook yet"),
    ):
        status, output = autograder(root, "export", *arguments)
        assert status == 2 and message in output, output
