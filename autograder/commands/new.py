"""Write a first version of a new assignment, from the template, for you to change.

The new folders are assignments/NN_name, with the check that instructor/README.md explains, and
instructor/NN_name, with a notebook of one task and its solution, and right and wrong solutions.
This assignment passes its tests and can be released, so any later failure comes from a change.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from autograder.course import find_sources, handed_out
from autograder.errors import CommandFailed

TEMPLATE = Path(__file__).parents[1] / "template"
_NAME = re.compile(r"\d\d_[a-z][a-z0-9_]*")


def new(root: Path, name: str) -> Path:
    """Write ``instructor/NN_name/`` and ``assignments/NN_name/``; return the first path.

    Raises:
        CommandFailed: there is no ``instructor/``, the name is not usable, or a folder exists.

    """
    if not _NAME.fullmatch(name):
        raise CommandFailed(
            f"{name!r} is no usable name: use a name like 12_my_topic, two digits and small letters"
        )
    folder = find_sources(root) / name
    for target in (folder, handed_out(folder)):
        if target.exists():
            raise CommandFailed(f"{target} exists already: choose another name, or remove it first")
    for path in (path for path in TEMPLATE.iterdir() if path.is_file()):
        to = handed_out(folder) if path.name == "checks.py" else folder
        to.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8").replace("NN_name", name).replace("NN", name[:2])
        (to / path.name.replace("NN_name", name)).write_text(text, encoding="utf-8")
    return folder


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("assignment", help="name of the new folder, such as 12_my_topic")


def run(root: Path, arguments: argparse.Namespace) -> int:
    """Write the folder for the command line; return the exit status."""
    folder = new(root, arguments.assignment)
    print(f"written: {folder} and {handed_out(folder)}; next: The steps, in instructor/README.md")
    return 0
