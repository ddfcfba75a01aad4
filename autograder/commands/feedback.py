"""``autograder feedback``: write each student's page, and name the students without one."""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

from nbgrader.apps.api import NbGraderAPI

from autograder.course import data_folder, load_config

DESCRIPTION = """\
Write grading/feedback/STUDENT/ASSIGNMENT/NOTEBOOK.html for every graded submission. The page says
what was examined, which case failed first and why, and how many hidden cases there were. It has the
points for written questions with your comments, the late penalty, and questions about the grade
with your answers. No submission can make the page run a script or fetch anything.
nbgrader generate_feedback writes the same pages; nbgrader release_feedback hands them out through
the exchange."""
EXAMPLES = """\
examples:
  autograder feedback
  autograder feedback 02_data_parallel_sgd
  autograder feedback 02_data_parallel_sgd --student ada"""


class FeedbackError(RuntimeError):
    """Feedback cannot be written; the message says what to do."""


def feedback(root: Path, assignment: str = "", student: str = "*") -> dict[str, list[str]]:
    """Write the pages; return assignment → students whose page could not be written.

    Raises:
        FeedbackError: nothing was graded.

    """
    config = load_config(root)
    data = data_folder(root, config)
    graded = sorted((data / "autograded").glob(f"{student}/{assignment or '*'}"))
    if not graded:
        raise FeedbackError(
            f"no submission of {assignment or 'any assignment'} is graded: run autograder grade "
            f"{assignment}"
        )
    api = NbGraderAPI(config=config)
    missing: dict[str, list[str]] = {}
    done = 0
    for name in sorted({folder.name for folder in graded}):
        missing[name] = []
        for folder in (each for each in graded if each.name == name):
            _show(done := done + 1, len(graded))
            # One by one: nbgrader stops at the first submission that it cannot convert.
            outcome = api.generate_feedback(name, folder.parent.name, force=True)
            pages = data / "feedback" / folder.parent.name / name
            wanted = {path.stem for path in folder.glob("*.ipynb")}
            written = {path.stem for path in pages.glob("*.html")}
            if not outcome["success"] or wanted - written:
                missing[name].append(folder.parent.name)
    return missing


def _show(done: int, of: int) -> None:
    if sys.stderr.isatty():
        print(f"\rwriting {done} of {of} …", end="" if done < of else "\n", file=sys.stderr)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument("assignment", nargs="?", default="", help="its name (default: all)")
    parser.add_argument("--student", default="*", help="one student's id (default: all)")


def run(root: Path, arguments: argparse.Namespace) -> int:
    """Write feedback for the command line; return 1 if a page is missing."""
    warnings.filterwarnings("ignore", module="nbgrader.api")
    try:
        missing = feedback(root, arguments.assignment, arguments.student)
    except FeedbackError as error:
        print(f"autograder feedback: {error}", file=sys.stderr)
        return 2
    folder = data_folder(root) / "feedback"
    for name, students in missing.items():
        pages = len(list(folder.glob(f"{arguments.student}/{name}/*.html")))
        print(f"{name}: {pages} pages in {folder}")
        if students:
            print(f"  no page could be written for: {', '.join(students)}; grade them again")
    return int(any(missing.values()))
