"""``autograder regrade``: grade again after a check was fixed, or explain one student's grade."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Change:
    """One student's points, before and after.

    Attributes:
        student: their id.
        before: points that are booked; None if there are none yet.
        after: points that the checks give now.
        tasks: the tasks whose points differ.

    """

    student: str
    before: float | None
    after: float
    tasks: tuple[str, ...]


def changes(folders: Folders, assignment: str, outcomes: Sequence[Outcome]) -> list[Change]:
    """Compare the new points with those that were booked last, student by student."""
    new: dict[str, dict[str, Verdict]] = {}
    for outcome in outcomes:
        if outcome.verdict:
            verdict = Verdict.read(Path(outcome.verdict))
            new.setdefault(verdict.student, {})[verdict.notebook] = verdict
    found = []
    for student, verdicts in new.items():
        old = current(folders, assignment, student)
        before, after = _points(old), _points(verdicts)
        tasks = (task for task in after if before.get(task) != after[task])
        found.append(
            Change(
                student,
                sum(before.values()) if old else None,
                sum(after.values()),
                tuple(tasks) if old else (),
            )
        )
    return found


def _points(verdicts: dict[str, Verdict]) -> dict[str, float]:
    return {check.task: check.score for verdict in verdicts.values() for check in verdict.checks}


def table(found: Sequence[Change]) -> str:
    """Return the changes as text: students who lose come first; the last line counts."""
    known = [each for each in found if each.before is not None]
    moved = sorted(
        (each for each in known if each.tasks), key=lambda each: each.after - (each.before or 0)
    )
    rows = [
        (e.student, e.before, e.after, f"{e.after - (e.before or 0):+g}", ", ".join(e.tasks))
        for e in moved
    ]
    lines = [format_rows(("student", "old", "new", "change", "tasks"), rows)] if rows else []
    gain = sum(each.after > (each.before or 0) for each in moved)
    lose = sum(each.after < (each.before or 0) for each in moved)
    lines.append(
        f"students: {gain} gain, {lose} lose, {len(known) - gain - lose} keep their "
        f"points, {len(found) - len(known)} had no points before"
    )
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("assignment", help="the assignment's name, such as 02_data_parallel_sgd")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--all", action="store_true", help="grade every submission again")
    which.add_argument(
        "--changed",
        action="store_true",
        help="grade only submissions whose code or checks changed since grading",
    )
    which.add_argument("--one", metavar="STUDENT", help="explain the grade of this student")
    grade.add_choices(parser)


def run(root: Path, arguments: argparse.Namespace) -> int:
    """Regrade for the command line; return the exit status."""
    assignment, (settings, jobs) = arguments.assignment, grade.choices(root, arguments)
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
    folders = Folders.at(root)
    print(f"\n{table(changes(folders, assignment, outcomes))}\n")
    print(f"Nothing was booked. To book the new points: autograder grade {assignment}")
    return status
