"""Later deadlines of single students, from ``grading/extensions.csv``.

The instructor writes this file::

    assignment,student_id,until
    02_data_parallel_sgd,ada,2026-11-25 23:59

A group has a line for each member. `collect` counts days late from these times, and
every ``autograder grade`` gives them to nbgrader before it renews the penalties.
"""

from __future__ import annotations

from datetime import datetime, tzinfo
from pathlib import Path

from autograder.collection.listing import SourceError
from autograder.collection.roster import kept_roster, read_table
from autograder.collection.times import read_time

_COLUMNS = ("assignment", "student_id", "until")


def read_extensions(data: Path, assignment: str, zone: tzinfo | None) -> dict[str, datetime]:
    """Return student → their own deadline for an assignment; empty if there is no file.

    Raises:
        SourceError: the file lacks a column, or a line has no time; the message names the line.

    """
    path = data / "extensions.csv"
    if not path.is_file():
        return {}
    header, rows = read_table(path)
    if missing_columns := [name for name in _COLUMNS if name not in header]:
        raise SourceError(
            f"{path} has no column {missing_columns[0]}: it needs the columns {', '.join(_COLUMNS)}"
        )
    students = kept_roster(data)
    deadlines = {}
    for number, row in rows:
        if row.get("assignment") == assignment:
            student = row.get("student_id", "")
            listed_student = students.find(student, "")
            try:
                until = read_time(row.get("until", ""), zone)
            except SourceError as error:
                raise SourceError(f"{path}, line {number}: {error}") from None
            deadlines[listed_student.student_id if listed_student else student] = until
    return deadlines
