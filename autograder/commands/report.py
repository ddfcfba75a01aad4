"""``autograder report``: how the class did, task by task, and why tasks failed."""

from __future__ import annotations

import argparse
from pathlib import Path

from autograder.class_report import class_report
from autograder.collection.roster import kept_roster
from autograder.course import Folders
from autograder.errors import CommandFailed
from autograder.files import write_whole
from autograder.pool.book import current
from autograder.pool.class_list import handed_in, students

DESCRIPTION = """\
Show how the class did in an assignment: who passed each task, the distribution of points, the most
frequent reasons for failures with the students who got them, the time of each check, and what
students predicted. The points are those that were last booked from checks. The same report is
written as a page, grading/report/ASSIGNMENT.html. It names students, so never hand it out. The
command changes no grades."""
EXAMPLES = """\
examples:
  autograder report 02_data_parallel_sgd"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument("assignment", help="the assignment's name, such as 02_data_parallel_sgd")


def run(root: Path, arguments: argparse.Namespace) -> int:
    """Write and print the report; return the exit status."""
    folders, name = Folders.at(root), arguments.assignment
    roster = kept_roster(folders.data)
    there = [s for s in students(folders, name) if not roster or s in roster.students]
    left = sorted(set(students(folders, name)) - set(there))
    notebooks = {student: handed_in(folders, name, student) for student in there}
    verdicts = {student: list(current(folders, name, student).values()) for student in there}
    if not any(verdicts.values()):
        raise CommandFailed(f"no submission is graded yet: run autograder grade {name}")
    report = class_report(name, verdicts, notebooks)
    page = folders.data / "report" / f"{name}.html"
    write_whole(page, report.as_page())
    print(report.as_text())
    if left:
        print(f"not counted, because they are not in the class list: {', '.join(left)}")
    print(f"as a page: {page}")
    return 0
