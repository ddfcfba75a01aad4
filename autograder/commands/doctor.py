"""``autograder doctor``: test what grading needs: a sandbox, and right grades."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from functools import partial, update_wrapper
from pathlib import Path

from nbgrader.apps.api import NbGraderAPI

from autograder import gradebook
from autograder.commands.demo import ASSIGNMENT, must
from autograder.commands.feedback import write_page
from autograder.course import Folders, Settings, handed_out, load_config
from autograder.errors import SandboxUnavailable
from autograder.passes.examine import Exam
from autograder.passes.self_test import KnownSolutions, SelfTest
from autograder.sandbox.bubblewrap import probe
from autograder.sandbox.sandbox import Sandbox
from course_lib.learner.doctor import Finding, print_all

DESCRIPTION = (
    "Check whether this machine can grade: start a sandbox, grade three solutions whose points are "
    "known, and write a feedback page. Say what to do if not. Exit status: 0 if grading works, "
    "else 1."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options: none."""


def run(root: Path, arguments: argparse.Namespace) -> int:
    """Run all tests, print the results, and return the exit status."""
    of_course = (update_wrapper(partial(look, root), look) for look in (graded, page))
    failed = print_all((bubblewrap, *of_course))
    print(f"\nGrading does not work: {', '.join(failed)}." if failed else "\nGrading works here.")
    return int(bool(failed))


def bubblewrap() -> Finding:
    """Start a sandbox, as the autograder does, and test whether it has what grading needs."""
    if sys.platform != "linux":
        advice = "grade on Linux, in WSL 2 or in a Linux container; everything else works here"
        return Finding("sandbox", f"there is none on {sys.platform}", advice)
    try:
        started = f"it starts, with {probe()}"
        with Sandbox() as sandbox:
            sandbox.make_ready()
        return Finding("sandbox", started)
    except SandboxUnavailable as error:
        advice = "`autograder --version` says what to do on each system; only grading needs this"
        return Finding("sandbox", " ".join(error.reason.split()), advice)


def graded(root: Path) -> Finding:
    """Grade solutions whose points are known, as the autograder does before it grades a class."""
    name = "graded"
    if sys.platform != "linux":
        return Finding(name, "only on Linux", "see sandbox above")
    if not (sources := _sources(root)):
        return Finding(name, _NO_SOURCES)
    try:
        return Finding(name, _try_out(sources))
    except Exception as error:  # any error means that grading does not work here
        message = " ".join(str(error).split()) or type(error).__name__
        advice = "do not grade here before this is fixed: the grades would be wrong"
        return Finding(name, message, advice)


def page(root: Path) -> Finding:
    """Write the feedback page of a released notebook, as autograder feedback does."""
    if not (sources := _sources(root)):
        return Finding("page", _NO_SOURCES)
    name = next((source.name for source in sources if source.name == ASSIGNMENT), sources[0].name)
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(root, data=Path(folder))
        api = NbGraderAPI(config=config)
        must(api.generate_assignment(name), "releasing the assignment")
        copy = Path(folder, "autograded", "student", name)
        shutil.copytree(Path(folder, "release", name), copy)
        with gradebook.opened(config) as book:
            book.add_student("student")
            book.add_submission(name, "student")
        if problem := write_page(api, name, "student"):
            summary = f"feedback on {name} could not be written: {problem.reason}"
            return Finding("page", summary, problem.advice)
    return Finding("page", f"feedback on {name} can be written")


_NO_SOURCES = "not tested: this copy of the course has no hidden cases"


def _sources(root: Path) -> list[Path]:
    """Return the folders of the assignments that have hidden cases."""
    folder = Folders.at(root).source
    return sorted(path.parent for path in folder.glob("*/hidden.py"))


def _try_out(sources: Sequence[Path]) -> str:
    """Run the self-test of the first assignment whose known solutions send messages."""
    for source in sources:
        released = handed_out(source)
        solutions = KnownSolutions.of(Exam.of(source), source, released)
        if solutions is not None and solutions.ranks > 1:
            test = SelfTest(source, released, Settings())
            test.run()
            return (
                f"{source.name}: a right, a wrong and a crashing solution "
                f"got the right points, in {test.seconds:.1f} s"
            )
    raise LookupError("this copy of the course has no assignment with a solution to test with")
