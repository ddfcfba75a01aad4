"""Show the solution of an assignment, or of one of its tasks, to those who learn on their own.

You are asked first. A copy of the course that a teacher made for students may have no solutions.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from course_lib.installed import PACKAGE, find_course
from course_lib.learner import CannotGoOn, _course, did_you_mean
from course_lib.learner.notebooks import MARK_SCHEME
from course_lib.learner.start import confirm
from course_lib.learner.what_counts import grade_id, is_check, role

_WARNING = (
    "Once you have read the solution, you can no longer find it yourself. In a graded course,\n"
    "the rules may forbid reading it before you hand in."
)
_MARK = re.compile(r" *### (BEGIN|END) SOLUTION\n?")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("assignment", metavar="ASSIGNMENT", help="name, number or topic")
    parser.add_argument("task", nargs="?", metavar="TASK", help="only this task (default: all)")
    parser.add_argument("--yes", action="store_true", help="do not ask")


def run(arguments: argparse.Namespace) -> int:
    """Show the solution; return the exit status."""
    course = find_course()
    name = _course.find(course, arguments.assignment)
    names = [task.name for task in _course.tasks(course, name)]
    if arguments.task and arguments.task not in names:
        listed = ", ".join(names)
        similar = did_you_mean(arguments.task, names)
        raise CannotGoOn(f"there is no task {arguments.task}.{similar} The tasks are {listed}")
    source = course / "instructor" / name / f"{name}.ipynb"
    if not source.is_file():
        raise CannotGoOn(
            "this copy of the course has no solutions. They are in the folder instructor/, which "
            f"your teacher has. You can read the reference implementations in {PACKAGE}"
        )
    print(_WARNING)
    if not (arguments.yes or confirm("Show the solution?")):
        print("Not shown.")
        return 1
    print(solution(source, [arguments.task] if arguments.task else names))
    return 0


def solution(source: Path, chosen: list[str]) -> str:
    """Return the text of the solution cells of the chosen tasks.

    The cells before a check are its solution; the solution of a question is its mark scheme.
    """
    shown: list[str] = []
    waiting: list[str] = []
    scheme: list[str] = []
    for cell in _course.read(source).cells:
        if is_check(cell):
            if grade_id(cell) in chosen:
                shown += waiting
            waiting = []
        elif role(cell).get("solution"):
            if role(cell).get("grade"):
                shown += scheme if grade_id(cell) in chosen else []
            else:
                waiting.append(_MARK.sub("", cell["source"]).strip())
        scheme = MARK_SCHEME.findall(cell["source"])
    return "\n\n\n".join(["", *shown, ""]).strip("\n") + "\n"
