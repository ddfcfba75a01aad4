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
from autograder.pool.class_list import assignments, standings
from autograder.tables import format_rows

STATES = {
    "graded": "complete",
    "outdated": "outdated",
    "failed": "failed",
    "booked": "points",
    "by hand": "by_hand",
}
"""A column of the table → what it counts, an attribute of `Standing`."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("assignment", nargs="?", help="the assignment's name (default: all)")


def run(root: Path, arguments: argparse.Namespace) -> int:
    """Print the table; return the exit status."""
    config = load_config(root)
    folders, settings = Folders.of(config.CourseDirectory), Settings.of(config)
    names = [arguments.assignment] if arguments.assignment else assignments(folders)
    roster = kept_roster(folders.data)
    rows: list[tuple[object, ...]] = []
    notes: list[str] = []
    for name in names:
        students = folders.submitters(name)
        if not folders.notebooks(name) and students:
            rows.append((name, len(students), *[0] * len(STATES)))
            notes.append(f"{name}: not released: run nbgrader generate_assignment {name}")
            continue
        states = standings(config, name, settings) if students or arguments.assignment else []
        counts = (sum(bool(getattr(s, state)) for s in states) for state in STATES.values())
        rows.append((name, len(states), *counts))
        notes += [
            f"{name}: {s.student}: not in the class list"
            for s in states
            if not roster.has(s.student)
        ]
        notes += [f"{name}: {s.student}: submitted no notebook" for s in states if not s.notebooks]
        notes += [f"{name}: {s.student}: {s.failed.splitlines()[-1]}" for s in states if s.failed]
    print(format_rows(("assignment", "submitted", *STATES), rows))
    if notes:
        print("\n" + "\n".join(notes))
    return 0
