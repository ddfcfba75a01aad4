"""Write grading/feedback/STUDENT/ASSIGNMENT/NOTEBOOK.html for every graded submission.

The page says what was examined, which case failed first and why, and how many hidden cases there
were. It also has the points for written questions with your comments, the late penalty, and
questions about the grade with your answers. No submission can make the page run a script or fetch
anything. With --release, the pages of students who used nbgrader submit are handed out through the
exchange, and the others are named. nbgrader generate_feedback writes the same pages. For Moodle and
Canvas, give --zip and the zip of submissions that you collected. The pages are then packed into a
new zip, whose file names tell the system the student of each page.

For example::

  autograder feedback 02_data_parallel_sgd
  autograder feedback 02_data_parallel_sgd --student ada
  autograder feedback 02_data_parallel_sgd --zip submissions.zip
  autograder feedback 02_data_parallel_sgd --release
"""

from __future__ import annotations

import argparse
import logging
import sys
import traceback
import zipfile
from collections.abc import Collection, Sequence
from pathlib import Path

from nbgrader.apps.api import NbGraderAPI
from traitlets.config import Config

from autograder.collection.collecting import hand_ins_by_student
from autograder.collection.formats import SECRET
from autograder.commands import add_assignment, add_students, print_step
from autograder.course import Folders, load_config
from autograder.errors import CommandFailed

UPLOAD = {
    "moodle": "in Moodle: View all submissions > Upload multiple feedback files in a zip",
    "canvas": "in Canvas: Gradebook > the assignment's menu > Re-Upload Submissions",
}


def feedback(config: Config, assignment: str, only: Sequence[str] = ()) -> dict[str, str]:
    """Write an assignment's pages; return the students without one, and why.

    Args:
        config: nbgrader's configuration.
        assignment: its name.
        only: the students; by default all.

    Raises:
        CommandFailed: nothing was graded, or nothing of one of `only`.

    """
    folders = Folders.of(config.CourseDirectory)
    graded = sorted(path.parent.name for path in folders.autograded.glob(f"*/{assignment}"))
    ungraded = [name for name in only if name not in graded]
    if ungraded or not graded:
        sender = f" from {ungraded[0]}" if ungraded else ""
        raise CommandFailed(
            f"no submission{sender} of {assignment} has been graded yet: first run "
            f"autograder grade {assignment}"
        )
    graded = [name for name in graded if name in only or not only]
    api, without = NbGraderAPI(config=config), {}
    for number, student in enumerate(graded, 1):
        # One by one: nbgrader stops at the first submission that it cannot convert.
        if reason := write_page(api, assignment, student):
            without[student] = reason
        print_step("written feedback", number, len(graded), student)
    return without


def write_page(api: NbGraderAPI, assignment: str, student: str) -> str:
    """Write one student's pages; return why one is missing, or an empty string."""
    folders = Folders.of(api.coursedir)
    api.log.addHandler(failure := _Failure())
    try:
        outcome = api.generate_feedback(assignment, student, force=True)
    finally:
        api.log.removeHandler(failure)
    notebooks = {path.stem for path in (folders.autograded / student / assignment).glob("*.ipynb")}
    pages = (folders.data / "feedback" / student / assignment).glob("*.html")
    if outcome["success"] and notebooks <= {path.stem for path in pages}:
        return ""
    return failure.reason or "nbgrader gives no reason"


NO_PAGE = (
    "grade these students again; `autograder doctor` tests whether pages can be written here. The "
    "instructor's guide has known reasons, under When something goes wrong"
)


class _Failure(logging.Handler):
    """Keeps the exception that nbgrader handles when it logs an error."""

    reason = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Put the exception into words, with the package that raised it."""
        error = sys.exception()
        if error is None or self.reason:
            return
        frames = traceback.walk_tb(error.__traceback__)
        modules = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in frames]
        (*_, package) = (name for name in modules if name not in sys.stdlib_module_names)
        self.reason = f"{type(error).__name__}: {error} (raised in {package})"


def pack(root: Path, assignment: str, source: str) -> None:
    """Pack an assignment's pages into a zip that Moodle or Canvas accepts; say who is not in it.

    Args:
        root: the course folder.
        assignment: its name.
        source: the zip of submissions that the system exported, or its folder.

    Raises:
        CommandFailed: the source comes from a system that accepts no feedback files.
        SourceError: the source cannot be read.

    """
    data = Folders.at(root).data
    by_student, system = hand_ins_by_student(root, assignment, source)
    if system not in UPLOAD:
        raise CommandFailed(
            f"{source} has the format {system}, but --zip needs a zip from Moodle or Canvas. "
            "Hand out the pages in grading/feedback yourself, or give --release"
        )
    to, without = data / "feedback" / f"{assignment}_for_{system}.zip", []
    to.parent.mkdir(parents=True, exist_ok=True)
    draft = to.with_suffix(".part")
    with zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED) as archive:
        for student, hand_ins in sorted(by_student.items()):
            pages = sorted((data / "feedback" / student / assignment).glob("*.html"))
            start = max(hand_ins, key=lambda hand_in: hand_in.order).returned_as
            for page in pages if start else []:
                archive.write(page, f"{start}feedback_{page.name}")
            if not pages or not start:
                without.append(student)
    draft.replace(to)
    with_page = {path.parents[1].name for path in to.parent.glob(f"*/{assignment}/*.html")}
    _say_who("not in the zip, because they have no page", without)
    _say_who(f"left out, because {source} does not have them", with_page - by_student.keys())
    print(f"written: {to}; upload it {UPLOAD[system]}")


def _say_who(reason: str, students: Collection[str]) -> None:
    if students:
        print(f"  {reason}: {', '.join(sorted(students))}")


def release(root: Path, assignment: str, only: Sequence[str]) -> None:
    """Hand the pages out through nbgrader's exchange; say which students it cannot reach.

    The exchange finds a student's page by a secret that ``nbgrader submit`` wrote beside the
    submission. Without this secret, nbgrader's own command stops.

    Raises:
        CommandFailed: nbgrader could not write into the exchange.

    """
    config = load_config(root)
    folders = list((Folders.at(root).data / "feedback").glob(f"*/{assignment}"))
    required = (SECRET, "timestamp.txt")
    reached = {f.parent.name for f in folders if all((f / name).is_file() for name in required)}
    unreached = {f.parent.name for f in folders} - reached
    left_out = {name for name in reached if only and name not in only}
    without = {name for name in unreached if name in only or not only}
    _say_who("not in the exchange, where they submitted nothing", without)
    if reached == left_out:
        return
    config.CourseDirectory.student_id_exclude = ",".join(unreached | left_out)
    outcome = NbGraderAPI(config=config).release_feedback(assignment)
    if not outcome["success"]:
        raise CommandFailed(f"nbgrader could not write into the exchange: {outcome['log'][-500:]}")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_assignment(parser)
    add_students(parser)
    parser.add_argument(
        "--zip",
        dest="source",
        metavar="SUBMISSIONS",
        help="the zip of submissions from Moodle or Canvas; the pages are packed into a zip that "
        "Moodle or Canvas can read",
    )
    parser.add_argument(
        "--release", action="store_true", help="hand the pages out through nbgrader's exchange"
    )


def run(root: Path, arguments: argparse.Namespace) -> int:
    """Write feedback for the command line; return 1 if a page is missing."""
    name, only = arguments.assignment, arguments.student
    problems = feedback(load_config(root), name, only)
    print(f"{name}: the pages are in {Folders.at(root).data / 'feedback'}")
    for student, reason in problems.items():
        print(f"  no page could be written for {student}: {reason}")
    if problems:
        print(f"  → {NO_PAGE}")
    if arguments.source:
        pack(root, name, arguments.source)
    if arguments.release:
        release(root, name, only)
    return int(bool(problems))
