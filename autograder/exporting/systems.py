"""Write grades in the columns that Canvas, Moodle and spreadsheets read.

Canvas's importer wants ``Student, ID, …, Section`` before the assignments. It finds students by
``ID``, then by ``SIS Login ID`` (``lib/gradebook_importer.rb``). Moodle recognises its grading
worksheet by ``Identifier``, ``Grade`` and ``Last modified (grade)``
(``mod/assign/feedback/offline/importgradeslib.php``). For both systems, the safest way is to fill
in the file that the system exported.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from datetime import tzinfo
from pathlib import Path

from autograder.collection.roster import Student, decode
from autograder.collection.tables import csv_text
from autograder.collection.times import shown
from autograder.exporting.grades import MISSING, ExportError, Grade

PLAIN = (
    *("assignment", "student_id", "last_name", "first_name", "name", "email", "status"),
    *("submitted", "days_late", "raw_score", "late_penalty", "score", "max_score"),
)
CANVAS = ("Student", "ID", "SIS User ID", "SIS Login ID", "Section")
WORKSHEET = (
    *("Identifier", "Full name", "ID number", "Email address", "Status", "Grade"),
    *("Maximum Grade", "Grade can be changed", "Last modified (submission)"),
    *("Last modified (grade)", "Feedback comments"),
)
MOODLE = ("First name", "Last name", "ID number", "Email address")

ByStudent = Mapping[str, Mapping[str, Grade]]
"""Student id → assignment → grade."""


def plain(
    grades: Sequence[Grade], zero: bool, zone: tzinfo | None = None, tasks: bool = False
) -> str:
    """Return one line for each student and assignment; with `tasks`, a column for each task."""
    rows = []
    names = list(dict.fromkeys(name for grade in grades for name in grade.tasks)) if tasks else []
    for grade in grades:
        who = grade.student
        rows.append(
            (
                *(grade.assignment, who.student_id, who.last_name, who.first_name, who.name),
                *(who.email, grade.status, shown(grade.submitted, zone), grade.days_late or ""),
                *(_number(grade.raw_score), grade.late_penalty or ""),
                *(_points(grade, zero), grade.max_score),
                *(_number(grade.tasks.get(name)) for name in names),
            )
        )
    return csv_text([*PLAIN, *names], rows)


def canvas(
    grades: Sequence[Grade], zero: bool, titles: Mapping[str, str], fill: Path | None
) -> str:
    """Return Canvas's import file: a column for each assignment, a line of points possible.

    Args:
        grades: the grades.
        zero: give 0 if nothing was submitted; otherwise the cell is empty, and Canvas keeps its
            own value.
        titles: assignment → title of its column in Canvas, such as ``Homework 2 (77)``.
        fill: Canvas's own export, whose students and numbers are kept.

    """
    by_student, maximum = _sorted(grades)
    header: Sequence[str] = CANVAS
    people = [(who.student_id, _canvas_cells(who)) for who in _students(grades)]
    if fill is not None:
        own, lines = _own_file(fill)
        if own[:1] != ["Student"] or "Section" not in own or "ID" not in own:
            raise ExportError(
                f"{fill} is no grade export of Canvas: its first line must be Student, ID, …, "
                "Section. In Canvas use Grades > Export"
            )
        header = own[: own.index("Section") + 1]
        titles = {name: titles.get(name) or _title(name, own) for name in maximum}
        lines = [line for line in lines if "points possible" not in line[0].lower() and line[1]]
        keys = [key for key in ("SIS Login ID", "SIS User ID", "ID") if key in header]
        ours = {who.system_id: who.student_id for who in _students(grades) if who.system_id}
        people = [
            (_whose(line, own, keys, by_student, ours), line[: len(header)]) for line in lines
        ]
    head = [*header, *(titles.get(name, name) for name in maximum)]
    possible: list[object] = ["    Points Possible", *[""] * (len(header) - 1), *maximum.values()]
    rows = [possible]
    for student, cells in people:
        rows.append([*cells, *(_cell(by_student, student, name, zero) for name in maximum)])
    return csv_text(head, rows)


def worksheet(grades: Sequence[Grade], zero: bool, fill: Path | None) -> str:
    """Return Moodle's grading worksheet of one assignment; fill in the exported one if given.

    If Moodle's maximum differs from ours, the grade is scaled to Moodle's maximum.
    """
    by_student, maximum = _sorted(grades)
    (name,) = maximum
    if fill is None:
        people = [
            (who.student_id, _worksheet_cells(who, maximum[name])) for who in _students(grades)
        ]
        header = list(WORKSHEET)
    else:
        header, lines = _own_file(fill)
        if not {"Identifier", "Grade", "Last modified (grade)"} <= set(header):
            raise ExportError(
                f"{fill} is not a grading worksheet from Moodle: it needs the columns Identifier, "
                "Grade and Last modified (grade). In Moodle, open the assignment and use "
                '"Download grading worksheet"'
            )
        keys = [key for key in ("ID number", "Username", "Email address") if key in header]
        ours = {who.system_id: who.student_id for who in _students(grades) if who.system_id}
        people = [
            (_whose(line, header, [*keys, "Identifier"], by_student, ours), line) for line in lines
        ]
    rows = []
    for student, cells in people:
        row: dict[str, object] = dict(zip(header, cells, strict=False))
        grade = by_student.get(student, {}).get(name)
        points = _points(grade, zero) if grade else ""
        if grade and points != "":
            top = float(str(row.get("Maximum Grade") or grade.max_score).replace(",", "."))
            row["Grade"] = round(float(points) * top / grade.max_score, 2) if grade.max_score else 0
            if "Feedback comments" in row:
                row["Feedback comments"] = _comment(grade)
        rows.append([row.get(key, "") for key in header])
    return csv_text(header, rows)


def moodle_gradebook(grades: Sequence[Grade], zero: bool, titles: Mapping[str, str]) -> str:
    """Return a file for Moodle's *Grades → Import → CSV file*: a column for each assignment."""
    by_student, maximum = _sorted(grades)
    head = [*MOODLE, *(titles.get(name, f"Assignment: {name} (Real)") for name in maximum)]
    rows = [
        [
            *(who.first_name or who.name, who.last_name, who.student_id, who.email),
            *(_cell(by_student, who.student_id, name, zero) for name in maximum),
        ]
        for who in _students(grades)
    ]
    return csv_text(head, rows)


def _sorted(grades: Sequence[Grade]) -> tuple[ByStudent, dict[str, float]]:
    found: dict[str, dict[str, Grade]] = {}
    for grade in grades:
        found.setdefault(grade.student.student_id, {})[grade.assignment] = grade
    return found, {grade.assignment: grade.max_score for grade in grades}


def _students(grades: Sequence[Grade]) -> list[Student]:
    return list({grade.student.student_id: grade.student for grade in grades}.values())


def _canvas_cells(who: Student) -> list[str]:
    name = f"{who.last_name}, {who.first_name}" if who.last_name and who.first_name else who.name
    return [name or who.student_id, who.system_id, "", who.student_id, who.section]


def _worksheet_cells(who: Student, maximum: float) -> list[str]:
    identifier = f"Participant {who.system_id}" if who.system_id else ""
    name = who.name or who.student_id
    return [
        identifier,
        name,
        who.student_id,
        who.email,
        "",
        "",
        f"{maximum:g}",
        "Yes",
        "-",
        "-",
        "",
    ]


def _own_file(path: Path) -> tuple[list[str], list[list[str]]]:
    try:
        text = decode(path.read_bytes())
    except OSError as error:
        raise ExportError(f"cannot read {path}: {error.strerror}") from error
    lines = [line for line in csv.reader(io.StringIO(text)) if any(line)]
    if not lines:
        raise ExportError(f"{path} is empty")
    header = [name.strip() for name in lines[0]]
    return header, [line + [""] * (len(header) - len(line)) for line in lines[1:]]


def _whose(
    line: Sequence[str],
    header: Sequence[str],
    keys: Sequence[str],
    known: ByStudent,
    ours: Mapping[str, str],
) -> str:
    """Return the course's id of the student in a line of a system's file, or an empty string.

    Ids may differ in case, if only one student's then fits.
    """
    alike: dict[str, list[str]] = {}
    for student in known:
        alike.setdefault(student.casefold(), []).append(student)
    for key in keys:
        cell = line[header.index(key)].strip()
        for guess in (cell, cell.partition("@")[0], ours.get(cell.split(" ")[-1], "")):
            if guess in known:
                return guess
            if len(found := alike.get(guess.casefold(), [])) == 1:
                return found[0]
    return ""


def _title(name: str, header: Sequence[str]) -> str:
    """Return the column of a file whose title contains the assignment's name."""
    return next((column for column in header if name in column), name)


def _cell(grades: ByStudent, student: str, name: str, zero: bool) -> object:
    grade = grades.get(student, {}).get(name)
    return _points(grade, zero) if grade else ""


def _points(grade: Grade, zero: bool) -> float | str:
    if grade.score is None:
        return 0 if zero and grade.status == MISSING else ""
    return _number(grade.score)


def _number(value: float | None) -> float | str:
    return "" if value is None else round(value, 4)


def _comment(grade: Grade) -> str:
    if grade.status == MISSING:
        return "nothing submitted"
    told = f"{grade.raw_score:g} of {grade.max_score:g} points"
    if grade.late_penalty:
        days = f"{grade.days_late} day{'s' * (grade.days_late != 1)}"
        told += f"; late penalty for {days}: {grade.late_penalty:g}"
    return told
