"""Grade again and show old and new points side by side: who gains, who loses.

Nothing is booked: autograder grade does that. The inputs are drawn from the same seeds as before. A
submission whose points were not booked counts as graded for the first time, not as changed. With
--one, examine one student again with the inputs of the verdict: print every case, also hidden ones
in full, draw a timeline, and book nothing. This output is for instructors only.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import nbformat

from autograder.commands import grade
from autograder.course import Folders, find_sources
from autograder.errors import CommandFailed
from autograder.examination.verdict import Verdict, checks_digest, points_of
from autograder.passes.examine import Exam, examine_notebook
from autograder.passes.tell import timeline_of
from autograder.pool.book import current
from autograder.pool.worker import Outcome
from autograder.tables import format_rows
from course_lib.checking.cases import AuthorError


def changes(folders: Folders, assignment: str, outcomes: Sequence[Outcome]) -> str:
    """Compare the new points with those that were booked last: who loses comes first.

    The last line counts the students.
    """
    new: dict[str, dict[str, float]] = {}
    for outcome in outcomes:
        if outcome.verdict:
            verdict = Verdict.read(Path(outcome.verdict))
            new.setdefault(verdict.student, {}).update(points_of([verdict]))
    moved: list[tuple[float, str, float, float, str]] = []
    first = 0
    for student, after in new.items():
        if not (booked := current(folders, assignment, student)):
            first += 1
            continue
        before = points_of(booked.values())
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


def explain(root: Path, assignment: str, student: str) -> bool:
    """Examine a student's graded notebooks again, and print every case; book nothing.

    Draw the timeline of the first visible case that failed. Return whether all points are the same.

    Raises:
        CommandFailed: the student has no verdict, or the graded notebook beside it is gone.

    """
    folders, sources = Folders.at(root), find_sources(root)
    verdicts = current(folders, assignment, student)
    if not verdicts:
        raise CommandFailed(f"{student} has no verdict: run autograder grade {assignment}")
    same = True
    for old in verdicts.values():
        released = folders.release / assignment / f"{old.notebook}.ipynb"
        new = replace(
            old,
            checks=[],
            notes=[],
            timings={},
            checks_sha256=checks_digest(sources / assignment, released),
        )
        graded = old.kept_in(folders).with_suffix(".ipynb")
        if not graded.is_file():
            raise CommandFailed(f"there is no {graded}: run autograder grade {assignment}")
        nb = nbformat.read(graded, as_version=4)
        examine_notebook(nb, Exam.of(sources / assignment), new)
        print(_explained(old, new))
        for check in new.checks:
            png, _ = timeline_of(check)
            if png:
                path = folders.data / "verdicts" / assignment / student / f"{old.notebook}.png"
                path.write_bytes(png)
                print(f"Timeline of {check.task}, case {check.trace['case']!r}: {path}")
                break
        same &= [c.score for c in old.checks] == [c.score for c in new.checks]
    return same


def _explained(old: Verdict, new: Verdict) -> str:
    """Describe every case of the new examination, and its differences from the old one."""
    lines = [f"{old.student}, {old.notebook}: {new.score:g} of {new.max_score:g} points"]
    for check in new.checks:
        lines.append(f"\n{check.name}: {check.score:g} of {check.max_score:g}")
        for case in check.cases:
            hidden = " (hidden)" if case["hidden"] else ""
            mark = "✓" if case["passed"] else "✗"
            lines.append(f"  {mark} {case['name']}{hidden}  {case['seconds']:.2f} s")
            message = "\n".join(part for part in (case["reason"], case["detail"]) if part)
            lines += [f"      {line}" for line in message.splitlines()]
    before = {check.name: check.score for check in old.checks}
    moved = [c for c in new.checks if before.get(c.name) != c.score]
    if old.checks_sha256 != new.checks_sha256:
        lines.append("\nThe checks have changed since the verdict was given.")
    if moved:
        lines.append("Points, in the verdict → now:")
        lines += [f"  {c.name}: {before.get(c.name, 0):g} → {c.score:g}" for c in moved]
    else:
        lines.append("\nThe points are the same as in the verdict.")
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    grade.add_options(parser)
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--all", action="store_true", help="grade every submission again")
    choice.add_argument(
        "--changed",
        action="store_true",
        help="grade only submissions whose code or checks changed since grading",
    )
    choice.add_argument("--one", metavar="STUDENT", help="explain the grade of this student")


def run(root: Path, arguments: argparse.Namespace) -> int:
    """Regrade for the command line; return the exit status."""
    assignment = arguments.assignment
    settings, workers = grade.choices(root, arguments)
    if arguments.one:
        try:
            return int(not explain(root, assignment, arguments.one))
        except AuthorError as error:
            raise CommandFailed(str(error)) from error
    outcomes = grade.grade_class(
        root, assignment, arguments.student, settings, again=arguments.all, **workers
    )
    status = grade.report(outcomes)
    print(f"\n{changes(Folders.at(root), assignment, outcomes)}\n")
    print(f"Nothing was booked. To book the new points: autograder grade {assignment}")
    return status
