"""Run the cells and the checks of your copy of an assignment from the top, in a new process.

Print the reports and count the points. Exit status: 0 if all checks pass, else 1.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from course_lib.installed import find_course
from course_lib.learner import CannotGoOn, _course
from course_lib.learner._course import Task
from course_lib.learner._run_cells import run_steps
from course_lib.learner.start import add_desk, desk_of, desk_option
from course_lib.learner.what_counts import is_check, is_run, rebuild

LOOK_EVERY = 0.5
"""Seconds between two looks whether a watched notebook was saved."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "assignment",
        metavar="ASSIGNMENT",
        help="the assignment's name, number or topic; or the path of a notebook",
    )
    parser.add_argument(
        "--watch", action="store_true", help="check again whenever you save it, until Ctrl-C"
    )
    add_desk(parser)


def run(arguments: argparse.Namespace) -> int:
    """Check the copy; return the exit status."""
    course = find_course()
    name = _course.find(course, arguments.assignment)
    path = Path(arguments.assignment)
    is_notebook = path.suffix == ".ipynb" and path.is_file()
    notebook = path if is_notebook else _course.notebook_of(desk_of(arguments, course), name)
    if not notebook.is_file():
        make = f"course start {name}{desk_option(arguments)}"
        raise CannotGoOn(f"you have no copy of {name} yet. Make one: {make}")
    tasks = _course.tasks(course, name)

    def check() -> int:
        outcomes, notes = check_notebook(course, name, notebook)
        print(summary(name, tasks, outcomes))
        for note in notes:
            print(f"  Note: {note}.")
        decided = [outcome for outcome in outcomes.values() if not outcome.get("undecided")]
        return int(any(outcome["fraction"] < 1 for outcome in decided))

    return _again_and_again(notebook, check) if arguments.watch else check()


def _again_and_again(notebook: Path, check: Callable[[], object]) -> NoReturn:
    """Check now, and whenever the notebook is saved; Ctrl-C ends it."""
    while True:
        saved = _saved_at(notebook)
        try:
            check()
        except CannotGoOn as error:
            print(f"course check: {error}", file=sys.stderr)
        print(f"\nSave {notebook} to check it again, or end this with Ctrl-C.", flush=True)
        while _saved_at(notebook) in (saved, None):
            time.sleep(LOOK_EVERY)


def _saved_at(notebook: Path) -> int | None:
    """Return when it was saved; None while an editor puts a new file in its place."""
    try:
        return notebook.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def check_notebook(course: Path, name: str, notebook: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the outcome of each check, and notes on the notebook.

    Raises:
        CannotGoOn: the file is not a notebook, or its kernel has ended.

    """
    released = _course.read(_course.notebook_of(course, name))
    rebuilt = rebuild(released, _course.read(notebook))
    code = enumerate((cell for cell in rebuilt.cells if cell.cell_type == "code"), 1)
    # `rebuild` empties stubs.
    steps = [(n, c) for n, c in code if is_check(c) or (is_run(c) and c.source.strip())]
    outcomes, notes = run_steps(steps, notebook.resolve().parent)
    return outcomes, [*rebuilt.metadata.get("rebuild", ()), *notes]


def summary(name: str, tasks: list[Task], outcomes: dict[str, Any]) -> str:
    """Return the points as a table."""
    width = max(len(task.name) for task in tasks)
    lines, earned, possible = [name], 0.0, 0.0
    for task in tasks:
        outcome = outcomes.get(task.name)
        if outcome is not None and (undecided := outcome.get("undecided")):
            lines.append(f"  {task.name:{width}}     – of {task.points:<3g} {undecided}")
        elif outcome is not None:
            points = task.points * outcome["fraction"]
            earned, possible = earned + points, possible + task.points
            reason = textwrap.shorten(outcome["reason"], 90, placeholder=" …")
            lines.append(f"  {task.name:{width}}  {points:4g} of {task.points:<3g} {reason}")
        elif not task.checked:
            lines.append(
                f"  {task.name:{width}}     – of {task.points:<3g} a person reads this answer"
            )
    lines.append(f"  {'from checks':{width}}  {earned:4g} of {possible:<3g}")
    return "\n".join(line.rstrip() for line in lines)
