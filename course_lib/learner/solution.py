"""``course solution 03_collectives``: show the solution to people who learn on their own."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from course_lib.diary import CHECKS, in_lecture, kept
from course_lib.installed import PACKAGE, find_course
from course_lib.learner import _course
from course_lib.learner._course import Task
from course_lib.learner.start import add_desk, confirm, desk_of
from course_lib.learner.what_counts import grade_id, is_check, role

DESCRIPTION = (
    "Show the solution of an assignment, or of one of its tasks. You are asked first. A copy of "
    "the course that a teacher made for students may have no solutions."
)
_MARK = re.compile(r" *### (BEGIN|END) SOLUTION\n?")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("assignment", metavar="ASSIGNMENT", help="name, number or topic")
    parser.add_argument("task", nargs="?", metavar="TASK", help="only this task (default: all)")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    add_desk(parser)


def run(arguments: argparse.Namespace) -> int:
    """Show the solution; return the exit status."""
    course = find_course()
    try:
        name = _course.find(course, arguments.assignment)
        tasks = _course.tasks(course, name)
        if arguments.task and arguments.task not in [task.name for task in tasks]:
            names = ", ".join(task.name for task in tasks)
            raise _course.Unknown(f"there is no task {arguments.task}; the tasks are {names}")
        source = course / "instructor" / name / f"{name}.ipynb"
        if not source.is_file():
            print(_without(name), file=sys.stderr)
            return 2
        chosen = [t for t in tasks if not arguments.task or t.name == arguments.task]
        print(standing(name, chosen, desk_of(arguments, course)))
        if not (arguments.yes or confirm("Show the solution?")):
            print("Not shown.")
            return 1
        print(solution(source, [task.name for task in chosen]))
    except _course.Unknown as error:
        print(f"course solution: {error}", file=sys.stderr)
        return 2
    return 0


def _without(name: str) -> str:
    """Return the message for a copy of the course without solutions."""
    module = name.partition("_")[2]
    reference = next((p for p in (PACKAGE / f"{module}.py", PACKAGE / module) if p.exists()), None)
    also = f" You can read the reference implementation: {reference}." if reference else ""
    return (
        "course solution: this copy of the course has no solutions. They are in the folder "
        f"instructor/, which your teacher has.{also}"
    )


def standing(name: str, tasks: list[Task], desk: Path) -> str:
    """Return a text for learners to consider: how far they are, and what reading costs them."""
    checks = [entry for entry in kept(CHECKS, desk) if not in_lecture(entry)]
    passed = {entry.get("checked") for entry in checks if entry.get("all")}
    tried = {entry.get("checked") for entry in checks}
    checked = [task for task in tasks if task.checked]
    solved = sum(f"{name}/{task.name}" in passed for task in checked)
    begun = sum(f"{name}/{task.name}" in tried for task in checked)
    so_far = f"Tasks with a check: {len(checked)}. You have tried {begun} and solved {solved}."
    return (
        f"{so_far}\nOnce you have read the solution, you can no longer find it yourself. In a "
        "graded course,\nthe rules may forbid reading it before you hand in."
    )


def solution(source: Path, chosen: list[str]) -> str:
    """Return the text of the solution cells of the chosen tasks.

    The cells before a check are its solution; the cell of a question is its own solution.
    """
    shown: list[str] = []
    waiting: list[str] = []
    for cell in _course.read(source).cells:
        if is_check(cell):
            if grade_id(cell) in chosen:
                shown += waiting
            waiting = []
        elif role(cell).get("solution"):
            text = _MARK.sub("", cell["source"]).strip()
            if role(cell).get("grade"):
                shown += [text] if grade_id(cell) in chosen else []
            else:
                waiting.append(text)
    return "\n\n\n".join(["", *shown, ""]).strip("\n") + "\n"
