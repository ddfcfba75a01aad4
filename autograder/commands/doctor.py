"""Check whether this machine can grade; say what to do if not.

Start a sandbox, grade three solutions whose points are known, and write a feedback page. Say where
the course, its class and the exchange are. Exit status: 0 if grading works, else 1.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from functools import partial, update_wrapper
from pathlib import Path

from nbgrader.apps.api import NbGraderAPI

from autograder import gradebook
from autograder.commands import must
from autograder.commands.demo import ASSIGNMENT
from autograder.commands.feedback import NO_PAGE, write_page
from autograder.course import Folders, Settings, handed_out, load_config
from autograder.errors import SandboxUnavailable
from autograder.examination.verdict import versions
from autograder.passes.self_test import SelfTest
from autograder.sandbox.bubblewrap import probe
from autograder.sandbox.sandbox import Sandbox
from course_lib.learner.doctor import Finding, print_all


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options: none."""


def run(root: Path, arguments: argparse.Namespace) -> int:
    """Run all tests, print the results, and return the exit status."""
    looks = (course, bubblewrap, graded, page)
    failed = print_all(update_wrapper(partial(look, root), look) for look in looks)
    print(f"\nGrading does not work: {', '.join(failed)}." if failed else "\nGrading works here.")
    return int(bool(failed))


def course(root: Path) -> Finding:
    """Say where the course, its class and the exchange are, and what grades it."""
    parts = {"class": Folders.at(root).data, "exchange": load_config(root).Exchange.root}
    parts |= versions()
    return Finding("course", f"{root}; " + ", ".join(map("{} {}".format, parts, parts.values())))


def bubblewrap(root: Path) -> Finding:
    """Start a sandbox, as the autograder does, and test whether it has what grading needs."""
    try:
        started = f"it starts, with the bubblewrap {probe()}"
        with Sandbox() as sandbox:
            sandbox.make_ready()
        return Finding("sandbox", started)
    except SandboxUnavailable as error:
        advice = "`autograder --version` says what to do on each system; only grading needs this"
        return Finding("sandbox", " ".join(error.reason.split()), advice)


def graded(root: Path) -> Finding:
    """Grade solutions whose points are known, as the autograder does before it grades a class."""
    if not (source := _source(root)):
        return Finding("graded", _NO_SOURCES)
    test = SelfTest(source, handed_out(source), Settings())
    try:
        test.run()
    except Exception as error:  # any error means that grading does not work here
        message = str(error).partition("\n")[0] or type(error).__name__
        advice = "do not grade here before this is fixed: the grades would be wrong"
        return Finding("graded", message, advice)
    solutions = f"{source.name}: a right, a wrong and a crashing solution"
    return Finding("graded", f"{solutions} got the right points")


def page(root: Path) -> Finding:
    """Write the feedback page of a released notebook, as autograder feedback does."""
    if not (source := _source(root)):
        return Finding("page", _NO_SOURCES)
    name = source.name
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(root, data=Path(folder))
        api = NbGraderAPI(config=config)
        must(api.generate_assignment(name), "releasing the assignment")
        copy = Path(folder, "autograded", "student", name)
        shutil.copytree(Path(folder, "release", name), copy)
        with gradebook.opened(config) as book:
            book.add_student("student")
            book.add_submission(name, "student")
        if reason := write_page(api, name, "student"):
            summary = f"feedback on {name} could not be written: {reason}"
            return Finding("page", summary, NO_PAGE)
    return Finding("page", f"feedback on {name} can be written")


_NO_SOURCES = "not tested: this copy of the course has no hidden cases"


def _source(root: Path) -> Path | None:
    """Return the folder of the assignment to try out, if this copy has hidden cases."""
    folders = (path.parent for path in Folders.at(root).source.glob("*/hidden.py"))
    # The demo's assignment has a task whose ranks send messages; a course may have dropped it.
    return min(folders, key=lambda folder: (folder.name != ASSIGNMENT, folder), default=None)
