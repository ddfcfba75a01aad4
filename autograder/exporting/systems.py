"""Write grades for spreadsheets, or into a file that Canvas or Moodle exported.

A system finds students and assignments by its own numbers and titles, and only its own file has
them all. So nothing but that file is filled in. Canvas's importer finds students by ``ID``, then by
``SIS Login ID`` (``lib/gradebook_importer.rb``). Moodle recognises its grading worksheet by
``Identifier``, ``Grade`` and ``Last modified (grade)``
(``mod/assign/feedback/offline/importgradeslib.php``).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import tzinfo
from pathlib import Path

from autograder.collection.roster import Student, number_of, read_csv
from autograder.collection.times import shown
from autograder.errors import CommandFailed
from autograder.exporting.grades import MISSING, Grade
from autograder.tables import csv_text

Line = tuple[str, Sequence[str]]
"""A line of a system's file: its student's id, or an empty string, and its cells."""
PLAIN = (
    *("assignment", "student_id", "last_name", "first_name", "name", "email", "status"),
    *("submitted", "days_late", "raw_score", "late_penalty", "score", "max_score"),
)


def plain(
    grades: Sequence[Grade], zero: bool, zone: tzinfo | None = None, tasks: bool = False
) -> str:
    """Return one line for each student and assignment; with `tasks`, a column for each task.

    If nothing was submitted, the score is 0 with `zero`, and otherwise empty.
    """
    rows = []
    names = list(dict.fromkeys(name for grade in grades for name in grade.tasks)) if tasks else []
    for grade in grades:
        student = grade.student
        rows.append(
            (
                *(grade.assignment, student.student_id, student.last_name, student.first_name),
                *(student.name, student.email, grade.status, shown(grade.submitted, zone)),
                *(grade.days_late or "", _number(grade.raw_score), grade.late_penalty or ""),
                *(_points(grade, zero), grade.max_score),
                *(_number(grade.tasks.get(name)) for name in names),
            )
        )
    return csv_text([*PLAIN, *names], rows)


def filled(
    path: Path, grades: Sequence[Grade], zero: bool, title: str = ""
) -> tuple[str, str, list[str]]:
    """Fill in a file that Canvas or Moodle exported.

    Return the system's name, the new text, and the students with points but no line in the file.

    Args:
        path: the file.
        grades: the grades.
        zero: give 0 if nothing was submitted; otherwise the system keeps its own value.
        title: title of the assignment's column in Canvas, such as ``Homework 2 (77)``; the number
            may be left out. By default it is the assignment's name.

    Raises:
        CommandFailed: the file comes from neither system, has no place for these grades, or has
            two places for the same.

    """
    try:
        (header, *lines), mark = read_csv(path)
    except csv.Error:
        header, lines, mark = [], [], ","
    header = [name.strip() for name in header]
    lines = [line + [""] * (len(header) - len(line)) for line in lines if any(line)]
    students = {grade.student.student_id: grade.student for grade in grades}.values()
    owners = [_owner(header, line, students) for line in lines]
    if twice := [owner for owner in owners if owner and owners.count(owner) > 1]:
        raise CommandFailed(f"{path} has two lines for {twice[0]}: delete the wrong one")
    with_points = {grade.student.student_id: None for grade in grades if grade.score is not None}
    without = [student for student in with_points if student not in owners]
    of_owners = list(zip(owners, lines, strict=True))
    if header[:1] == ["Student"] and {"ID", "Section"} <= set(header):
        return "canvas", _canvas(header, of_owners, grades, zero, title, mark), without
    if {"Identifier", "Grade", "Last modified (grade)"} <= set(header):
        return "moodle", _worksheet(header, of_owners, grades, zero, mark), without
    raise CommandFailed(
        f"{path} is neither a grade export of Canvas, which begins with Student, ID, …, Section, "
        "nor a grading worksheet from Moodle with the columns Identifier, Grade and Last modified "
        '(grade). In Canvas use Grades > Export. In Moodle, open the assignment and use "Download '
        'grading worksheet"'
    )


def _canvas(
    header: list[str],
    lines: Sequence[Line],
    grades: Sequence[Grade],
    zero: bool,
    title: str,
    mark: str,
) -> str:
    """Return Canvas's import file: its own students, and a column for each assignment."""
    grades_by_student = _by_student(grades)
    maximum = {grade.assignment: grade.max_score for grade in grades}
    titles = [_column(header, name, title) for name in maximum]
    head = header[: header.index("Section") + 1]
    rows: list[list[object]] = [["    Points Possible", *[""] * (len(head) - 1), *maximum.values()]]
    for owner, line in lines:
        if "points possible" in line[0].lower() or not line[1]:
            continue
        graded = grades_by_student.get(owner, {})
        points = (_points(graded[name], zero) if name in graded else "" for name in maximum)
        rows.append([*line[: len(head)], *points])
    return csv_text([*head, *titles], rows, mark)


def _column(header: Sequence[str], name: str, title: str) -> str:
    """Return the column of an assignment. Canvas adds a number to its title."""
    heading = title or name
    numbered = re.compile(rf"{re.escape(heading)} \(\d+\)")
    columns = [column for column in header if column == heading or numbered.fullmatch(column)]
    if title and columns.count(title) == 1:
        return title
    if len(columns) > 1:
        raise CommandFailed(
            f"the file has {len(columns)} columns that may be {heading!r}: {', '.join(columns)}. "
            "Give one of these titles with --title; if they are the same, rename one"
        )
    return columns[0] if columns else heading


def _worksheet(
    header: list[str], lines: Sequence[Line], grades: Sequence[Grade], zero: bool, mark: str
) -> str:
    """Return Moodle's grading worksheet of one assignment, with grades scaled to its maximum."""
    (name, *other_assignments) = {grade.assignment for grade in grades}
    if other_assignments:
        raise CommandFailed("a grading worksheet has one assignment: also give its name")
    if twice := [title for title in header if header.count(title) > 1]:
        raise CommandFailed(f"the worksheet has two columns {twice[0]!r}: delete one of them")
    grades_by_student = _by_student(grades)
    rows = []
    for owner, line in lines:
        row: dict[str, object] = dict(zip(header, line, strict=False))
        grade = grades_by_student.get(owner, {}).get(name)
        points = _points(grade, zero) if grade else ""
        if grade and points != "":
            top = _maximum(str(row.get("Maximum Grade", "")), grade.max_score)
            row["Grade"] = round(float(points) * top / grade.max_score, 2) if grade.max_score else 0
            if "Feedback comments" in row:
                row["Feedback comments"] = _comment(grade)
        rows.append([row.get(key, "") for key in header])
    return csv_text(header, rows, mark)


def _maximum(text: str, otherwise: float) -> float:
    """Return Moodle's maximum, or `otherwise` if there is none. Some languages write ``100,00``."""
    if text.strip() in ("", "-"):
        return otherwise
    if re.fullmatch(r"\d+([.,]\d+)?", text.strip()) is None:
        raise CommandFailed(
            f"the worksheet's Maximum Grade is {text!r}, not a number: choose the grade type Point "
            "in Moodle's settings of the assignment, and download the worksheet again"
        )
    return float(text.replace(",", "."))


def _by_student(grades: Sequence[Grade]) -> Mapping[str, Mapping[str, Grade]]:
    grades_by_student: dict[str, dict[str, Grade]] = {}
    for grade in grades:
        grades_by_student.setdefault(grade.student.student_id, {})[grade.assignment] = grade
    return grades_by_student


def _owner(header: Sequence[str], line: Sequence[str], students: Iterable[Student]) -> str:
    """Return the id of the student of a line in a system's file; empty if no student fits.

    Raises:
        CommandFailed: two students fit.

    """
    cells = [(title, cell.strip()) for title, cell in zip(header, line, strict=False)]
    fits = {
        student.student_id: f"{title} {cell}"
        for title, cell in cells
        for student in students
        if cell and _names(title, cell, student)
    }
    if len(fits) > 1:
        raise CommandFailed(
            f"a line of the file fits {' and '.join(f'{s} ({cell})' for s, cell in fits.items())}: "
            "correct the class list or the file"
        )
    return next(iter(fits), "")


_IDS = ("SIS Login ID", "SIS User ID", "ID number", "Username")


def _names(title: str, cell: str, student: Student) -> bool:
    """Tell whether a cell in a system's column names this student."""
    if title in ("ID", "Identifier"):
        return number_of(cell) == student.system_id
    if title not in (*_IDS, "Email address"):
        return False
    if title in _IDS and cell == student.student_id:
        return True
    if student.email:
        return cell.casefold() == student.email.casefold()
    return "@" in cell and cell.partition("@")[0] == student.student_id


def _points(grade: Grade, zero: bool) -> float | str:
    if grade.score is None:
        return 0 if zero and grade.status == MISSING else ""
    return _number(grade.score)


def _number(value: float | None) -> float | str:
    return "" if value is None else round(value, 4)


def _comment(grade: Grade) -> str:
    if grade.status == MISSING:
        return "nothing submitted"
    comment = f"{grade.raw_score:g} of {grade.max_score:g} point{'s' * (grade.max_score != 1)}"
    if grade.late_penalty:
        days = f"{grade.days_late} day{'s' * (grade.days_late != 1)}"
        comment += f"; late penalty for {days}: {grade.late_penalty:g}"
    return comment
