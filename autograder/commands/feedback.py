"""``autograder feedback``: write each student's page, and name the students without one."""

from __future__ import annotations

import argparse
import zipfile
from pathlib import Path

from nbgrader.apps.api import NbGraderAPI

from autograder.collection.collecting import hand_ins_by_student
from autograder.commands import Progress, add_assignment
from autograder.course import Folders, load_config
from autograder.errors import CommandFailed
from course_lib.ranks.explain.words import counted

DESCRIPTION = """\
Write grading/feedback/STUDENT/ASSIGNMENT/NOTEBOOK.html for every graded submission. The page says
what was examined, which case failed first and why, and how many hidden cases there were. It also
has the points for written questions with your comments, the late penalty, and questions about the
grade with your answers. No submission can make the page run a script or fetch anything.
With --release, the pages of students who used nbgrader submit are handed out through the exchange,
and the others are named. nbgrader generate_feedback writes the same pages. For Moodle and Canvas,
give --zip and the zip of submissions that you collected. The pages are then packed into a new zip,
whose file names tell the system the student of each page."""
EXAMPLES = """\
examples:
  autograder feedback 02_data_parallel_sgd
  autograder feedback 02_data_parallel_sgd --student ada
  autograder feedback 02_data_parallel_sgd --zip submissions.zip
  autograder feedback 02_data_parallel_sgd --release"""


UPLOAD = {
    "moodle": "in Moodle: View all submissions > Upload multiple feedback files in a zip",
    "canvas": "in Canvas: Gradebook > the assignment's menu > Re-Upload Submissions",
}


def feedback(root: Path, assignment: str, student: str = "*") -> list[str]:
    """Write an assignment's pages; return the students whose page could not be written.

    Raises:
        CommandFailed: nothing was graded.

    """
    config = load_config(root)
    data = Folders.at(root).data
    graded = sorted((data / "autograded").glob(f"{student}/{assignment}"))
    if not graded:
        whose = "no submission" if student == "*" else f"no submission from {student}"
        raise CommandFailed(
            f"{whose} of {assignment} has been graded yet: first run autograder grade {assignment}"
        )
    api = NbGraderAPI(config=config)
    missing = []
    progress = Progress("writing feedback", len(graded))
    for folder in graded:
        whose = folder.parent.name
        # One by one: nbgrader stops at the first submission that it cannot convert.
        outcome = api.generate_feedback(assignment, whose, force=True)
        wanted = {path.stem for path in folder.glob("*.ipynb")}
        written = {path.stem for path in (data / "feedback" / whose / assignment).glob("*.html")}
        if not outcome["success"] or wanted - written:
            missing.append(whose)
        progress.step()
    return missing


def pack(root: Path, assignment: str, source: str) -> tuple[Path, str, list[str], list[str]]:
    """Pack an assignment's pages into a zip that Moodle or Canvas accepts.

    Args:
        root: the course folder.
        assignment: its name.
        source: the zip of submissions that the system exported, or its folder.

    Returns:
        The zip, the system, the students in the source who have no page, and the students with a
        page who are not in the source, such as the other member of a pair.

    Raises:
        CommandFailed: the source comes from a system that accepts no feedback files.
        SourceError: the source cannot be read.

    """
    data = Folders.at(root).data
    found, system = hand_ins_by_student(root, assignment, source)
    if system not in UPLOAD:
        raise CommandFailed(
            f"{source} has the format {system}, but --zip needs a zip from Moodle or Canvas. "
            "Hand out the pages in grading/feedback yourself, or give --release"
        )
    to, without = data / "feedback" / f"{assignment}_for_{system}.zip", []
    to.parent.mkdir(parents=True, exist_ok=True)
    draft = to.with_suffix(".part")
    with zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED) as archive:
        for student, hand_ins in sorted(found.items()):
            pages = sorted((data / "feedback" / student / assignment).glob("*.html"))
            start = max(hand_ins, key=lambda each: each.order).returned_as
            for page in pages if start else []:
                archive.write(page, f"{start}feedback_{page.name}")
            if not pages or not start:
                without.append(student)
    draft.replace(to)
    with_page = {path.parents[1].name for path in to.parent.glob(f"*/{assignment}/*.html")}
    return to, system, without, sorted(with_page - found.keys())


def release(root: Path, assignment: str, student: str) -> list[str]:
    """Hand the pages out through nbgrader's exchange; return the students whom it cannot reach.

    The exchange finds a student's page by a secret that ``nbgrader submit`` wrote beside the
    submission. Without this secret, nbgrader's own command stops.

    Raises:
        CommandFailed: nbgrader could not write into the exchange.

    """
    config = load_config(root)
    folders = (Folders.at(root).data / "feedback").glob(f"{student}/{assignment}")
    wanted = ("submission_secret.txt", "timestamp.txt")
    found = {each.parent.name: all((each / n).is_file() for n in wanted) for each in folders}
    without = sorted(name for name, is_there in found.items() if not is_there)
    if len(without) == len(found):
        return without
    config.CourseDirectory.student_id_exclude = ",".join(without)
    config.CourseDirectory.student_id = "" if student == "*" else student
    outcome = NbGraderAPI(config=config).release_feedback(assignment)
    if not outcome["success"]:
        raise CommandFailed(f"nbgrader could not write into the exchange: {outcome['log'][-500:]}")
    return without


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_assignment(parser)
    parser.add_argument("--student", default="*", help="one student's id (default: all)")
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
    name = arguments.assignment
    missing = feedback(root, name, arguments.student)
    packed = pack(root, name, arguments.source) if arguments.source else None
    unreached = release(root, name, arguments.student) if arguments.release else []
    folder = Folders.at(root).data / "feedback"
    pages = len(list(folder.glob(f"{arguments.student}/{name}/*.html")))
    print(f"{name}: {counted(pages, 'page')} in {folder}")
    if missing:
        print(f"  no page could be written for: {', '.join(missing)}; grade these students again")
    if unreached:
        print(f"  not in the exchange, where they submitted nothing: {', '.join(unreached)}")
        print(f"  hand their pages out from {folder}")
    if packed:
        to, system, without, others = packed
        if without:
            print(f"  not in the zip, because they have no page: {', '.join(without)}")
        if others:
            print(f"  left out, because {arguments.source} does not have them: {', '.join(others)}")
            print(f"  hand their pages out from {folder}")
        print(f"written: {to}; upload it {UPLOAD[system]}")
    return int(bool(missing))
