"""``autograder doctor``: test what grading needs: a sandbox, and right grades."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from autograder.course import Settings, handed_out
from autograder.errors import SandboxUnavailable
from autograder.passes.examine import Exam
from autograder.passes.self_test import KnownSolutions, SelfTest
from autograder.sandbox.bubblewrap import probe
from autograder.sandbox.sandbox import Sandbox
from course_lib.installed import find_course
from course_lib.learner.doctor import Finding, print_all

DESCRIPTION = (
    "Check whether this machine can grade: start a sandbox, and grade three solutions whose points "
    "are known. Say what to do if not. Exit status: 0 if grading works, else 1."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options: none."""


def run(root: Path, arguments: argparse.Namespace) -> int:
    """Run all tests, print the results, and return the exit status."""
    wrong = print_all((bubblewrap, graded))
    print(f"\nGrading does not work: {', '.join(wrong)}." if wrong else "\nGrading works here.")
    return int(bool(wrong))


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


def graded() -> Finding:
    """Grade solutions whose points are known, as the autograder does before it grades a class."""
    name = "graded"
    if sys.platform != "linux":
        return Finding(name, "only on Linux", "see sandbox above")
    sources = sorted(path.parent for path in find_course().glob("instructor/*/hidden.py"))
    if not sources:
        return Finding(name, "not tested: this copy of the course has no hidden cases")
    try:
        return Finding(name, _try_out(sources))
    except Exception as error:  # any error means that grading does not work here
        wrong = " ".join(str(error).split()) or type(error).__name__
        advice = "do not grade here before this is fixed: the grades would be wrong"
        return Finding(name, wrong, advice)


def _try_out(sources: Sequence[Path]) -> str:
    """Run the self-test of the first assignment whose known solutions send messages."""
    for source in sources:
        released = handed_out(source)
        known = KnownSolutions.of(Exam.of(source), source, released)
        if known is not None and known.ranks > 1:
            test = SelfTest(source, released, Settings())
            test.run()
            return (
                f"{source.name}: a right, a wrong and a crashing solution "
                f"got the right points, in {test.seconds:.1f} s"
            )
    raise LookupError("this copy of the course has no assignment with a solution to test with")
