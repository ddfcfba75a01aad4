"""Make your own copy of an assignment, in work/.

Your work is never overwritten. If both you and the course have changed a file, the new version is
put beside yours.
"""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

from course_lib.diary import find_desk
from course_lib.installed import SHARED, find_course
from course_lib.learner import _course
from course_lib.learner._desk import refresh


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "assignment", metavar="ASSIGNMENT", help="name, number or topic: 03_collectives, 3"
    )
    add_desk(parser)


def add_desk(parser: argparse.ArgumentParser) -> None:
    """Declare ``--desk``, which most commands have."""
    parser.add_argument(
        "--desk",
        type=Path,
        help="folder of your copies (default: the one that you are inside, else work/)",
    )


def desk_of(arguments: argparse.Namespace, course: Path) -> Path:
    """Return the desk of ``--desk``, or around this folder; else ``work`` in the checkout.

    If the course is installed from a wheel, it is ``work`` in this folder.
    """
    folder = Path.cwd()
    work = (folder if course.parts[-2:] == SHARED else course) / "work"
    return Path(arguments.desk or find_desk(folder) or work).resolve()


def desk_option(arguments: argparse.Namespace) -> str:
    """Return what a command that is advised needs after it, to find the same desk."""
    return f" --desk {shlex.quote(str(arguments.desk))}" if arguments.desk else ""


def run(arguments: argparse.Namespace) -> int:
    """Hand out the assignment; return the exit status."""
    course = find_course()
    desk = desk_of(arguments, course)
    name = _course.find(course, arguments.assignment)
    notebook = _course.notebook_of(desk, name)
    fresh = not os.path.lexists(notebook)
    for note in refresh(course, desk):
        print(note)
    lecture = desk / "lectures" / f"{name}.ipynb"
    stays = "Handed out before, so your copy stays as it is (rename it to start over)"
    print(f"{'Handed out' if fresh else stays}: {notebook}")
    if lecture.is_file():
        print(f"It builds on the lecture: {lecture}")
    at = desk_option(arguments)
    print(f"\nTo open JupyterLab:     course lab{at}")
    print(f"To check your answers:  course check {name}{at}")
    return 0


def confirm(question: str) -> bool:
    """Ask a question and return whether the answer is yes; where nobody can answer, it is no.

    A command that a cell runs (``!course …``) has a terminal of its own, at which nobody types.
    """
    of_a_cell = "JPY_PARENT_PID" in os.environ or "inline" in os.environ.get("MPLBACKEND", "")
    try:
        if not of_a_cell:
            return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        pass
    print(f"{question} Nobody can answer here: to say yes, add --yes to the command.")
    return False
