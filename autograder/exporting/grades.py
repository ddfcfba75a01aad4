"""Read each student's grade in each assignment from nbgrader's gradebook, or why there is none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from nbgrader.api import Gradebook, MissingEntry
from traitlets.config import Config

from autograder import gradebook
from autograder.collection.extensions import read_extensions
from autograder.collection.roster import Roster, Student
from autograder.collection.times import course_zone, days_late, in_utc
from autograder.errors import CommandFailed

MISSING, NOT_GRADED, BY_HAND, GRADED = "missing", "not graded", "to be read", "graded"
LEFT = "not in the class list"


@dataclass(frozen=True)
class Grade:
    """One student's grade in one assignment.

    Attributes:
        status: ``not in the class list``, if the student left the class; ``missing``; ``not
            graded``, if the student submitted again since; ``to be read``, if a person must grade a
            question; or ``graded``.
        score: the points less the late penalty, at least 0; None if there are none.
        tasks: points of each task, including written questions that have been read.

    """

    student: Student
    assignment: str
    status: str
    max_score: float
    raw_score: float | None = None
    late_penalty: float = 0.0
    score: float | None = None
    submitted: datetime | None = None
    days_late: int = 0
    tasks: Mapping[str, float] = field(default_factory=dict)


def read_grades(
    config: Config, data: Path, roster: Roster, assignments: Sequence[str] = ()
) -> list[Grade]:
    """Return the grades by assignment, then in the order of the class list.

    Args:
        config: nbgrader's configuration.
        data: the class's folder, to find submissions that are not graded yet.
        roster: the class list. Students who are only in the gradebook come after it, marked as
            having left.
        assignments: their names; by default all in the gradebook.

    Raises:
        CommandFailed: there is no gradebook, or no such assignment in it.

    """
    if not gradebook.exists(config):
        raise CommandFailed("there is no gradebook yet: run autograder grade first")
    with gradebook.opened(config) as book:
        names = [assignment.name for assignment in book.assignments]
        if unknown := [name for name in assignments if name not in names]:
            raise CommandFailed(
                f"the gradebook has no assignment {unknown[0]!r}; it has: "
                f"{', '.join(names) or 'none'}"
            )
        students = dict(roster.students)
        for entry in book.students:
            students.setdefault(entry.id, _student(entry))
        grades = [
            grade
            for name in assignments or names
            for grade in _of_assignment(book, data, name, list(students.values()))
        ]
    return [g if roster.has(g.student.student_id) else replace(g, status=LEFT) for g in grades]


def extra_credit(config: Config, assignment: str) -> list[tuple[str, str, float]]:
    """Return student, task and points of each extra credit that a person gave in formgrader."""
    if not gradebook.exists(config):
        return []
    with gradebook.opened(config) as book:
        return [
            (submission.student.id, grade.cell.name, float(grade.extra_credit))
            for submission in book.assignment_submissions(assignment)
            for notebook in submission.notebooks
            for grade in notebook.grades
            if grade.extra_credit
        ]


def _student(entry: Any) -> Student:
    first, last = entry.first_name or "", entry.last_name or ""
    return Student(
        entry.id, entry.lms_user_id or "", f"{first} {last}".strip(), first, last, entry.email or ""
    )


def _of_assignment(
    book: Gradebook, data: Path, name: str, students: Sequence[Student]
) -> Iterator[Grade]:
    assignment = book.find_assignment(name)
    max_score = float(assignment.max_score)
    due = in_utc(assignment.duedate)
    zone = course_zone(data)
    due_of = read_extensions(data, name, zone)
    for student in students:
        handed_in = (data / "submitted" / student.student_id / name).is_dir()
        try:
            submission = book.find_submission(name, student.student_id)
        except MissingEntry:
            yield Grade(student, name, NOT_GRADED if handed_in else MISSING, max_score)
            continue
        if any(map(_left_without_points, submission.notebooks)):
            yield Grade(student, name, NOT_GRADED, max_score)
            continue
        time = in_utc(submission.timestamp)
        raw, penalty = float(submission.score), float(submission.late_submission_penalty or 0)
        yield Grade(
            student,
            name,
            BY_HAND if submission.needs_manual_grade else GRADED,
            max_score,
            raw,
            penalty,
            max(0.0, raw - penalty),
            time,
            days_late(time, due_of.get(student.student_id, due), zone),
            {g.cell.name: float(g.score) for n in submission.notebooks for g in n.grades},
        )


def _left_without_points(notebook: Any) -> bool:
    """Return whether a test cell has no points, because ``nbgrader autograde`` did not finish.

    nbgrader makes the row in the gradebook before it runs anything, and reads its sum as 0.
    """
    answers = {cell.name for cell in notebook.notebook.solution_cells}
    return any(
        grade.auto_score is None
        and grade.cell.cell_type == "code"
        and grade.cell.name not in answers
        for grade in notebook.grades
    )
