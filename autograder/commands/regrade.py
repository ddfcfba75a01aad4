"""``autograder regrade``: grade again after a check was fixed, or explain one student's grade."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from autograder.commands import _one_student, grade
from autograder.course import Folders
from autograder.errors import CommandFailed
from autograder.examination.verdict import Verdict
from autograder.pool import phases
from autograder.pool.book import current
from autograder.pool.worker import Outcome
from autograder.tables import format_rows
from course_lib.checking.cases import AuthorError

DESCRIPTION = (
    "Grade again and show old and new points side by side: who gains, who loses. Nothing is "
    "booked: autograder grade does that. The inputs are drawn from the same seeds as before. A "
    "submission whose points were not booked counts as graded for the first time, not as changed. "
    "With --one, examine one student again with the inputs of the verdict: print every case, also "
    "hidden ones in full, draw a timeline, and book nothing. This output is for instructors only."
)


def changes(folders: Folders, assignment: str, outcomes: Sequence[Outcome]) -> str:
    """Compare the new points with those that were booked last: who loses comes first.

    The last line counts the students.
    """
    new: dict[str, dict[str, float]] = {}
    for outcome in outcomes:
        if outcome.verdict:
            verdict = Verdict.read(Path(outcome.verdict))
            new.setdefault(verdict.student, {}).update(_points([verdict]))
    moved: list[tuple[float, str, float, float, str]] = []
    first = 0
    for student, after in new.items():
        if not (booked := current(folders, assignment, student)):
            first += 1
            continue
        before = _points(booked.values())
        if tasks := [task for task in after if before.get(task) != after[task]]:
            old, now = sum(before.values()), sum(after.values())
            moved.append((now - old, student, old, now, ", ".join(tasks)))
    rows = [(name, old, now, f"{by:+g}", tasks) for by, name, old, now, tasks in sorted(moved)]
    lines = [format_rows(("student", "old", "new", "change", "tasks"), rows)] if rows else []
    gain, lose = sum(row[0] > 0 for row in moved), sum(row[0] < 0 for row in moved)
    lines.append(
        f"students: {gain} gain, {lose} lose, {len(new) - first - gain - lose} keep their points, "
        f"{first} had no points before"
    )
    return "\n".join(lines)


def _points(verdicts: Iterable[Verdict]) -> dict[str, float]:
    return {check.task: check.score for verdict in verdicts for check in verdict.checks}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    grade.add_options(parser)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--all", action="store_true", help="grade every submission again")
    which.add_argument(
        "--changed",
        action="store_true",
        help="grade only submissions whose code or checks changed since grading",
    )
    which.add_argument("--one", metavar="STUDENT", help="explain the grade of this student")


def run(root: Path, arguments: argparse.Namespace) -> int:
    """Regrade for the command line; return the exit status."""
    assignment = arguments.assignment
    settings, jobs = grade.choices(root, arguments)
    if arguments.one:
        try:
            return int(not _one_student.explain(root, assignment, arguments.one))
        except AuthorError as error:
            raise CommandFailed(str(error)) from error
    outcomes = phases.grade_class(
        *(root, assignment, arguments.student, settings),
        jobs=jobs,
        again=arguments.all,
    )
    status = phases.report(outcomes)
    print(f"\n{changes(Folders.at(root), assignment, outcomes)}\n")
    print(f"Nothing was booked. To book the new points: autograder grade {assignment}")
    return status
