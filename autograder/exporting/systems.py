"""Write grades for spreadsheets, or into a file that Canvas or Moodle exported.

A system finds students and assignments by its own numbers and titles, and only its own file has
them all. So nothing but that file is filled in. Canvas's importer finds students by ``ID``, then by
``SIS Login ID`` (``lib/gradebook_importer.rb``). Moodle recognises its grading worksheet by
``Identifier``, ``Grade`` and ``Last modified (grade)``
(``mod/assign/feedback/offline/importgradeslib.php``).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from datetime import tzinfo
from pathlib import Path

from autograder.collection.roster import Roster, decode
from autograder.collection.times import shown
from autograder.errors import CommandFailed
from autograder.exporting.grades import MISSING, Grade
from autograder.tables import csv_text

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


def filled(path: Path, grades: Sequence[Grade], zero: bool, title: str = "") -> tuple[str, str]:
    """Fill in a file that Canvas or Moodle exported; return the system's name and the new text.

    Args:
        path: the file.
        grades: the grades.
        zero: give 0 if nothing was submitted; otherwise the system keeps its own value.
        title: title of the assignment's column in Canvas, such as ``Homework 2 (77)``; by default
            the title that contains the assignment's name.

    Raises:
        CommandFailed: the file comes from neither system, or has no place for these grades.

    """
    try:
        text = decode(path.read_bytes())
    except OSError as error:
        raise CommandFailed(f"cannot read {path}: {error.strerror}") from error
    lines = [line for line in csv.reader(io.StringIO(text)) if any(line)]
    header = [name.strip() for name in lines[0]] if lines else []
    lines = [line + [""] * (len(header) - len(line)) for line in lines[1:]]
    if header[:1] == ["Student"] and {"ID", "Section"} <= set(header):
        return "canvas", _canvas(header, lines, grades, zero, title)
    if {"Identifier", "Grade", "Last modified (grade)"} <= set(header):
        return "moodle", _worksheet(header, lines, grades, zero)
    raise CommandFailed(
        f"{path} is neither a grade export of Canvas, which begins with Student, ID, …, Section, "
        "nor a grading worksheet from Moodle with the columns Identifier, Grade and Last modified "
        '(grade). In Canvas use Grades > Export. In Moodle, open the assignment and use "Download '
        'grading worksheet"'
    )


def _canvas(
    header: list[str], lines: list[list[str]], grades: Sequence[Grade], zero: bool, title: str
) -> str:
    """Return Canvas's import file: its own students, and a column for each assignment."""
    whose = _finder(header, ("SIS Login ID", "SIS User ID", "ID"), grades)
    found = _by_student(grades)
    maximum = {grade.assignment: grade.max_score for grade in grades}
    titles = {
        name: title or next((column for column in header if name in column), name)
        for name in maximum
    }
    head = header[: header.index("Section") + 1]
    rows: list[list[object]] = [["    Points Possible", *[""] * (len(head) - 1), *maximum.values()]]
    for line in lines:
        if "points possible" in line[0].lower() or not line[1]:
            continue
        theirs = found.get(whose(line), {})
        points = (_points(theirs[name], zero) if name in theirs else "" for name in maximum)
        rows.append([*line[: len(head)], *points])
    return csv_text([*head, *titles.values()], rows)


def _worksheet(
    header: list[str], lines: list[list[str]], grades: Sequence[Grade], zero: bool
) -> str:
    """Return Moodle's grading worksheet of one assignment, with grades scaled to its maximum."""
    (name, *others) = {grade.assignment for grade in grades}
    if others:
        raise CommandFailed("a grading worksheet has one assignment: also give its name")
    whose = _finder(header, ("ID number", "Username", "Email address", "Identifier"), grades)
    found = _by_student(grades)
    rows = []
    for line in lines:
        row: dict[str, object] = dict(zip(header, line, strict=False))
        grade = found.get(whose(line), {}).get(name)
        points = _points(grade, zero) if grade else ""
        if grade and points != "":
            top = float(str(row.get("Maximum Grade") or grade.max_score).replace(",", "."))
            row["Grade"] = round(float(points) * top / grade.max_score, 2) if grade.max_score else 0
            if "Feedback comments" in row:
                row["Feedback comments"] = _comment(grade)
        rows.append([row.get(key, "") for key in header])
    return csv_text(header, rows)


def _by_student(grades: Sequence[Grade]) -> Mapping[str, Mapping[str, Grade]]:
    found: dict[str, dict[str, Grade]] = {}
    for grade in grades:
        found.setdefault(grade.student.student_id, {})[grade.assignment] = grade
    return found


def _finder(
    header: Sequence[str], columns: Sequence[str], grades: Sequence[Grade]
) -> Callable[[Sequence[str]], str]:
    """Return a function from a line of a system's file to the student's id in the course, or ""."""
    students = Roster(grade.student for grade in grades)
    places = [header.index(column) for column in columns if column in header]

    def whose(line: Sequence[str]) -> str:
        for cell in (line[place].strip() for place in places):
            for guess in (cell, cell.partition("@")[0], cell.split(" ")[-1]):
                if found := students.find(guess, ""):
                    return found.student_id
        return ""

    return whose


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
