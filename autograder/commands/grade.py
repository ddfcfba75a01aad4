"""``autograder grade``: a class in many processes, and then into the gradebook.

In the first phase each submission is examined; what comes of it is a verdict on disk, named by its
content. In the second, one writer books the verdicts through nbgrader. Killed at any moment, the
same command goes on where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from autograder.course import Folders, find_sources, load_config
from autograder.examination.gpus import gpu_mounts
from autograder.passes.settings import Settings
from autograder.pool import slurm
from autograder.pool.book import book
from autograder.pool.class_list import (
    Books,
    NothingToGrade,
    handed_in,
    standing,
    students,
)
from autograder.pool.local import grade_all
from autograder.pool.one import MACHINE, Outcome
from autograder.pool.progress import Progress
from autograder.sandbox import bubblewrap as sandbox
from autograder.sandbox.unavailable import SandboxUnavailable

DESCRIPTION = (
    "Grade all that was handed in of an assignment, several submissions at a time, and book it. "
    "What was graded already, with the same code and the same checks, is not run again; killed or "
    "interrupted, the command goes on where it was. What fails because of the machine is no zero: "
    "it is tried three times, then listed, and the exit status is 1."
)
TO_DO = """\
Nobody got a zero for this, and nothing of it is booked. Look at the reason; make room on the disk
or in memory, or take fewer --jobs; give the same command again: what is graded stays graded."""


class GradeError(RuntimeError):
    """Nothing can be graded; the message says what to do."""


def grade_class(
    root: Path,
    assignment: str,
    only: Sequence[str],
    settings: Settings,
    *,
    jobs: int,
    again: bool = False,
    cluster: slurm.Cluster | None = None,
) -> list[Outcome]:
    """Run the first phase, with progress on the terminal; return what became of each notebook.

    Raises:
        NothingToGrade: there is no such assignment or submission.
        SandboxUnavailable: nothing is graded without a sandbox.
        SlurmUnavailable: a cluster was asked for, and cannot be reached from here.
        GradeError: somebody else is grading this assignment.

    """
    find_sources(root)
    folders = Folders.of(root, load_config(root))
    paths: list[Path] = []
    for student in students(folders, assignment, only):
        found = handed_in(folders, assignment, student)
        if not found:
            lies = sorted(p.name for p in (folders.submitted / student / assignment).iterdir())
            expected = ", ".join(f"{name}.ipynb" for name in folders.notebooks(assignment))
            print(f"{student}: no {expected}; there is: {', '.join(lies) or 'nothing'}")
        paths += found
    if cluster is None:
        sandbox.probe()
        if settings.on == "gpu":
            gpu_mounts()
    with _alone(folders, assignment):
        progress = Progress("grading", len(paths))

        def tell(outcome: Outcome) -> None:
            note = f"{_name(outcome)}: {outcome.failed}" if outcome.failed else ""
            progress.step(outcome.unchanged, note)
            _remember(folders, outcome)

        if cluster is not None:
            folder = folders.graded(assignment) / "slurm"
            return slurm.grade_all(
                root, paths, settings, cluster, folder=folder, again=again, tell=tell
            )
        return grade_all(root, paths, settings, jobs=jobs, again=again, tell=tell)


def book_class(root: Path, assignment: str, only: Sequence[str], settings: Settings) -> list[str]:
    """Run the second phase, for all that is graded and not booked; return who could not be."""
    config = load_config(root)
    folders = Folders.of(root, config)
    with _alone(folders, assignment):
        books = Books(config, assignment)
        all_ = [
            standing(folders, assignment, student, settings, books)
            for student in students(folders, assignment, only)
        ]
        stale = [s.student for s in all_ if s.notebooks and not s.complete and not s.failed]
        if stale:
            print(
                f"{', '.join(stale)}: code or checks are not those that were graded, but newer: "
                "give the same command again"
            )
        waiting = [found for found in all_ if found.complete and not found.booked]
        if not waiting:
            print(f"booked already: {sum(found.booked for found in all_)}")
            return stale
        progress = Progress("booking", len(waiting))
        failed = book(
            *(folders, config, assignment, waiting),
            lambda student, why: progress.step(note=f"{student}: {why}" if why else ""),
        )
    return [*stale, *failed]


@contextlib.contextmanager
def _alone(folders: Folders, assignment: str) -> Iterator[None]:
    """Hold the assignment: a second command that grades or books it is refused."""
    folder = folders.graded(assignment)
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise GradeError(f"another command is grading {assignment}: wait for its end") from None
        for leftover in folder.glob("*/*.part"):  # of somebody who was killed
            leftover.unlink(missing_ok=True)
        yield
    finally:
        os.close(handle)


def _name(outcome: Outcome) -> str:
    return Path(outcome.path).parents[1].name


def _remember(folders: Folders, outcome: Outcome) -> None:
    path = Path(outcome.path)
    note = folders.graded(path.parent.name, _name(outcome)) / "failed.txt"
    with contextlib.suppress(OSError):  # a disk that is full; the report says it in any case
        if outcome.failed:
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(f"{outcome.fault}: {outcome.failed}\n", encoding="utf-8")
        else:
            note.unlink(missing_ok=True)


def report(outcomes: Sequence[Outcome]) -> int:
    """Say what was graded and what was not; return the exit status."""
    failed = [outcome for outcome in outcomes if outcome.failed]
    graded = [outcome for outcome in outcomes if not outcome.failed]
    kept = sum(outcome.unchanged for outcome in graded)
    print(f"graded: {len(graded)}, of which unchanged: {kept}; failed: {len(failed)}")
    for outcome in failed:
        print(f"  {_name(outcome)}: {outcome.fault}: {outcome.failed.splitlines()[-1]}")
    if any(outcome.fault == MACHINE for outcome in failed):
        print(TO_DO)
    if any(outcome.fault != MACHINE for outcome in failed):
        print("A check is broken: mend it under instructor/, then give the same command again.")
    return 1 if failed else 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("assignment", nargs="?", help="default: the only one that was handed in")
    add_choices(parser)


def add_choices(parser: argparse.ArgumentParser) -> None:
    """Declare what `grade` and `regrade` have in common."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser.add_argument(
        *("--jobs", "-j"),
        type=_positive,
        default=cores or 1,
        help="submissions at a time (default: %(default)s, one for each core)",
    )
    parser.add_argument(
        *("--student", "-s"),
        action="append",
        default=[],
        help="only this one; may be given several times",
    )
    parser.add_argument(
        "--on",
        choices=("cpu", "gpu"),
        help="run what is right on the grader's network once more on real ranks, on gloo or GPUs; "
        "with gpu one submission at a time has all GPUs (default: what nbgrader_config.py says)",
    )
    slurm.add_options(parser)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of submissions: 1, 2, …")
    return int(text)


def choices(root: Path, arguments: argparse.Namespace) -> tuple[str, Settings, int]:
    """Return assignment, settings and jobs of a command line.

    Raises:
        NothingToGrade: no assignment was named, and there is none or more than one.

    """
    config = load_config(root)
    settings = Settings.of(config)
    if arguments.on:
        settings = replace(settings, on=arguments.on)
    jobs = arguments.jobs
    if settings.on == "gpu" and jobs > 1:
        print("on GPUs: one submission at a time")
        jobs = 1
    return the_assignment(Folders.of(root, config), arguments.assignment), settings, jobs


def the_assignment(folders: Folders, named: str | None) -> str:
    """Return the one that was named, or else the only one that was handed in.

    Raises:
        NothingToGrade: there is none, or more than one.

    """
    if named:
        return named
    there = sorted({path.name for path in folders.submitted.glob("*/*") if path.is_dir()})
    if len(there) != 1:
        raise NothingToGrade(f"which assignment? Handed in were: {', '.join(there) or 'none'}")
    return there[0]


def run(root: Path, arguments: argparse.Namespace) -> int:
    """Grade and book for the command line; return the exit status."""
    try:
        assignment, settings, jobs = choices(root, arguments)
        only = arguments.student
        cluster = slurm.cluster(arguments, jobs)
        outcomes = grade_class(root, assignment, only, settings, jobs=jobs, cluster=cluster)
        unbooked = book_class(root, assignment, only, settings)
    except ERRORS as error:
        print(f"autograder grade: {error}", file=sys.stderr)
        return 2
    status = report(outcomes)
    if unbooked:
        print(f"not booked: {', '.join(unbooked)}; the reasons stand above")
    return 1 if unbooked else status


ERRORS = (NothingToGrade, GradeError, SandboxUnavailable, slurm.SlurmUnavailable)
