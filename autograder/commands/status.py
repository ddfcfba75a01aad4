"""Show how many submissions each assignment has, and their state.

The state is graded, outdated, failed, booked, or to be graded by hand. Outdated: code or checks
changed after grading. Failed: the machine or a check failed. Booked: the gradebook has points,
perhaps older ones. The command changes nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from autograder.collection.roster import kept_roster
from autograder.course import Folders, Settings, load_config
from autograder.pool.class_list import NothingToGrade, assignments, standings
from autograder.tables import format_rows

HEADS = ("submitted", "graded", "outdated", "failed", "booked", "by hand")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("assignment", nargs="?", help="the assignment's name (default: all)")


def run(root: Path, arguments: argparse.Namespace) -> int:
    """Print the table; return the exit status."""
    config = load_config(root)
    folders, settings = Folders.of(config.CourseDirectory), Settings.of(config)
    names = [arguments.assignment] if arguments.assignment else assignments(folders)
    if not names:
        print("nothing has been released or submitted yet: run nbgrader generate_assignment NAME")
        return 0
    roster = kept_roster(folders.data)
    rows: list[tuple[object, ...]] = []
    notes: list[str] = []
    for name in names:
        students = folders.submitters(name)
        if not folders.notebooks(name) and students:
            rows.append((name, len(students), *[0] * (len(HEADS) - 1)))
            notes.append(f"{name}: not released: run nbgrader generate_assignment {name}")
            continue
        try:
            states = standings(config, name, settings)
        except NothingToGrade:
            if arguments.assignment:
                raise
            states = []
        rows.append(
            (
                *(name, len(states), sum(s.complete for s in states)),
                *(sum(s.outdated for s in states), sum(bool(s.failed) for s in states)),
                *(sum(s.points for s in states), sum(s.by_hand for s in states)),
            )
        )
        notes += [
            f"{name}: {s.student}: not in the class list"
            for s in states
            if not roster.has(s.student)
        ]
        notes += [f"{name}: {s.student}: submitted no notebook" for s in states if not s.notebooks]
        notes += [f"{name}: {s.student}: {s.failed.splitlines()[-1]}" for s in states if s.failed]
    print(format_rows(("assignment", *HEADS), rows))
    if notes:
        print("\n" + "\n".join(notes))
    return 0
