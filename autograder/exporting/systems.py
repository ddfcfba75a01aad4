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
from autograder.exporting.grades import Grade
from autograder.tables import Row, csv_text

Line = tuple[Mapping[str, Grade], Sequence[str]]
"""A line of a system's file: its student's grade in each assignment, and its cells."""
PLAIN = (
    *("assignment", "student_id", "last_name", "first_name", "name", "email", "status"),
    *("submitted", "days_late", "raw_score", "late_penalty", "score", "max_score"),
)


def plain(grades: Sequence[Grade], zone: tzinfo | None, tasks: bool) -> str:
    """Return one line for each student and assignment; with `tasks`, a column for each task."""
    rows = []
    names = list(dict.fromkeys(name for grade in grades for name in grade.tasks)) if tasks else []
    for grade in grades:
        student = grade.student
        rows.append(
            (
                *(grade.assignment, student.student_id, student.last_name, student.first_name),
                *(student.name, student.email, grade.status, shown(grade.submitted, zone)),
                *(grade.days_late or "", _number(grade.raw_score), grade.late_penalty or ""),
                *(_number(grade.score), grade.max_score),
                *(_number(grade.tasks.get(name)) for name in names),
            )
        )
    return csv_text([*PLAIN, *names], rows)


def filled(path: Path, grades: Sequence[Grade], title: str) -> tuple[str, str, list[str]]:
    """Fill in a file that Canvas or Moodle exported.

    Return the system's name, the new text, and the students with points but no line in the file.

    Args:
        path: the file.
        grades: the grades.
        title: title of the assignment's column in Canvas, such as ``Homework 2 (77)``; the number
            may be left out. If it is empty, it is the assignment's name.

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
    by_student: dict[str, dict[str, Grade]] = {}
    for grade in grades:
        by_student.setdefault(grade.student.student_id, {})[grade.assignment] = grade
    with_points = {grade.student.student_id: None for grade in grades if grade.score is not None}
    without = [student for student in with_points if student not in owners]
    graded = [(by_student.get(owner, {}), line) for owner, line in zip(owners, lines, strict=True)]
    maximum = {grade.assignment: grade.max_score for grade in grades}
    if header[:1] == ["Student"] and {"ID", "Section"} <= set(header):
        columns, rows = _canvas(header, graded, maximum, title)
        return "canvas", csv_text(columns, rows, mark), without
    if {"Identifier", "Grade", "Last modified (grade)"} <= set(header):
        return "moodle", csv_text(header, _worksheet(header, graded, maximum), mark), without
    raise CommandFailed(
        f"{path} is neither a grade export of Canvas, which begins with Student, ID, …, Section, "
        "nor a grading worksheet from Moodle with the columns Identifier, Grade and Last modified "
        '(grade). In Canvas use Grades > Export. In Moodle, open the assignment and use "Download '
        'grading worksheet"'
    )


def _canvas(
    header: list[str], lines: Sequence[Line], maximum: Mapping[str, float], title: str
) -> tuple[list[str], list[Row]]:
    """Return Canvas's import file: its own students, and a column for each assignment."""
    titles = [_column(header, name, title) for name in maximum]
    head = header[: header.index("Section") + 1]
    rows: list[Row] = [["    Points Possible", *[""] * (len(head) - 1), *maximum.values()]]
    for grades, line in lines:
        if "points possible" not in line[0].lower() and line[1]:
            rows.append([*line[: len(head)], *(_points(grades.get(n)) for n in maximum)])
    return [*head, *titles], rows


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


def _worksheet(header: list[str], lines: Sequence[Line], maximum: Mapping[str, float]) -> list[Row]:
    """Return the lines of Moodle's grading worksheet of one assignment, scaled to its maximum."""
    (name, *other_assignments) = maximum
    if other_assignments:
        raise CommandFailed("a grading worksheet has one assignment: also give its name")
    if twice := [title for title in header if header.count(title) > 1]:
        raise CommandFailed(f"the worksheet has two columns {twice[0]!r}: delete one of them")
    rows: list[Row] = []
    for grades, line in lines:
        row: dict[str, object] = dict(zip(header, line, strict=False))
        points = _points(grades.get(name))
        if points != "":
            top = _maximum(str(row.get("Maximum Grade", "")), maximum[name])
            row["Grade"] = round(float(points) * top / maximum[name], 2) if maximum[name] else 0
        rows.append([row.get(key, "") for key in header])
    return rows


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


def _points(grade: Grade | None) -> float | str:
    return _number(grade.score if grade else None)


def _number(value: float | None) -> float | str:
    return "" if value is None else round(value, 4)
