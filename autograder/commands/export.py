"""Write grades from nbgrader's gradebook as CSV, for Canvas, Moodle or spreadsheets.

The late penalty is subtracted from the points. With --fill, grades are written into a file that
Canvas or Moodle exported, because only that file has the ids of students and assignments by which
the system finds them. Cells that a spreadsheet would read as a formula are quoted.

For example::

  autograder export
  autograder export 02_data_parallel_sgd --tasks
  autograder export 02_data_parallel_sgd --fill canvas_grades.csv --title "Homework 2 (77)"
  autograder export 02_data_parallel_sgd --fill worksheet.csv
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from autograder.collection.roster import kept_roster
from autograder.collection.times import course_zone
from autograder.course import Folders, load_config
from autograder.errors import CommandFailed
from autograder.exporting.grades import BY_HAND, NOT_GRADED, Grade, read_grades
from autograder.exporting.systems import filled, plain
from autograder.files import write_whole


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("assignment", nargs="?", help="the assignment's name (default: all)")
    parser.add_argument(
        "--fill",
        type=Path,
        metavar="CSV",
        help="fill in this file: Canvas's grade export, or Moodle's grading worksheet",
    )
    parser.add_argument("--title", default="", help="title of the assignment's column in Canvas")
    parser.add_argument(
        "--tasks", action="store_true", help="in the plain file, add a column for each task"
    )


def run(root: Path, arguments: argparse.Namespace) -> int:
    """Export for the command line; return the exit status."""
    if arguments.title and not (arguments.fill and arguments.assignment):
        raise CommandFailed("--title needs one ASSIGNMENT, and --fill with Canvas's file")
    if arguments.tasks and arguments.fill:
        raise CommandFailed("--tasks is for the plain file only")
    config, data = load_config(root), Folders.at(root).data
    names = [arguments.assignment] if arguments.assignment else []
    grades = read_grades(config, data, kept_roster(data), names)
    if not grades:
        raise CommandFailed("the gradebook has no students yet: run autograder grade first")
    if fill := arguments.fill:
        system, text, without = filled(fill, grades, arguments.title)
        if without:
            print(f"points, but no line in {fill}: {', '.join(without)}")
    else:
        system = "plain"
        text = plain(grades, course_zone(data), arguments.tasks)
    to = data / f"grades_{system}.csv"
    # Spreadsheets need the byte order mark to show 中文. Canvas and Moodle need none.
    write_whole(to, text, "utf-8-sig" if system == "plain" else "utf-8")
    _report(grades, to)
    return 0


def _report(grades: list[Grade], to: Path) -> None:
    for name in dict.fromkeys(grade.assignment for grade in grades):
        those = [grade for grade in grades if grade.assignment == name]
        counts = Counter(grade.status for grade in those)
        late = sum(grade.late_penalty > 0 for grade in those)
        counted = ", ".join(f"{n} {status}" for status, n in counts.items())
        print(f"{name}: {counted}; with a late penalty: {late}")
        if counts[BY_HAND]:
            print(
                "  to be read: written answers have no points yet; give points with make formgrader"
            )
        if counts[NOT_GRADED]:
            print(f"  not graded: run autograder grade {name}, then export again")
    print(f"written: {to}")
