"""Grade all submissions of an assignment, several at a time, and book their points.

A submission that was already graded with the same code and the same checks is not run again. A
command that was killed or interrupted continues where it was. If the machine fails, nobody gets a
zero: the submission is tried three times. If all three fail, the command lists the submission, and
its exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autograder.commands import add_assignment, add_students, print_step
from autograder.course import Folders, Settings, find_sources, load_config
from autograder.errors import CommandFailed
from autograder.passes.late import renew_penalties
from autograder.pool.book import book
from autograder.pool.class_list import handed_in, standings, students, verdict_on
from autograder.pool.grade_all import grade_all
from autograder.pool.worker import MACHINE, Outcome
from course_lib.cores import usable_cores
from course_lib.ranks.explain.words import counted

TO_DO = """\
No student got a zero for this, and nothing is booked for these submissions. Look at the reasons,
and at `autograder doctor`. Then give the same command again: graded submissions stay graded."""


def grade_class(
    root: Path,
    assignment: str,
    only: Sequence[str],
    settings: Settings,
    *,
    again: bool = False,
    **workers: Any,
) -> list[Outcome]:
    """Run the first phase, with progress on the terminal; return the outcome of each notebook.

    A notebook that has a verdict on the same content is graded only if `again`. `workers` are the
    options of `grade_all`.

    Raises:
        CommandFailed: there is no such assignment or submission, another command is grading it, or
            no worker could be started, so nothing is graded.

    """
    find_sources(root)
    folders = Folders.at(root)
    paths: list[Path] = []
    for student in students(folders, assignment, only):
        notebooks = handed_in(folders, assignment, student)
        if not notebooks:
            print(f"{student}: there is no notebook of this assignment's name")
        paths += notebooks
    with _alone(folders, assignment):
        graded, waiting = [], []
        for path in paths:
            if again or not (verdict := verdict_on(folders, path, settings)):
                waiting.append(path)
                continue
            target = str(verdict.kept_in(folders))
            graded.append(Outcome(str(path), target, unchanged=True, notes=verdict.notes))
            _remember(folders, graded[-1])
        numbers = itertools.count(1)

        def tell(outcome: Outcome) -> None:
            note = f"{_name(outcome)}{outcome.failed and f': {outcome.failed}'}"
            print_step("graded", next(numbers), len(waiting), note)
            _remember(folders, outcome)

        return graded + grade_all(root, assignment, waiting, settings, tell=tell, **workers)


def book_class(root: Path, assignment: str, only: Sequence[str], settings: Settings) -> list[str]:
    """Run the second phase: book all graded submissions; return those that could not be booked."""
    config = load_config(root)
    folders = Folders.of(config.CourseDirectory)
    with _alone(folders, assignment):
        states = standings(config, assignment, settings, only)
        if stale := [s.student for s in states if s.outdated and not s.failed]:
            print(
                f"code or checks have changed since these submissions were graded: "
                f"{', '.join(stale)}. Give the same command again"
            )
        waiting = [s for s in states if s.complete and not s.booked]
        if not waiting:
            booked = sum(s.booked for s in states)
            print(f"nothing to book: {counted(booked, 'submission')} booked already")
        failed = []
        for number, (student, reason) in enumerate(book(folders, config, assignment, waiting), 1):
            print_step("booked", number, len(waiting), f"{student}{reason and f': {reason}'}")
            failed += [student] if reason else []
        renew_penalties(config, assignment)
    return [*stale, *failed]


@contextlib.contextmanager
def _alone(folders: Folders, assignment: str) -> Iterator[None]:
    """Lock the assignment, so that a second command that grades or books it is refused."""
    folder = folders.graded(assignment)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise CommandFailed(
            f"cannot write to {folder}: {error.strerror}. Make room there, or check who owns it; "
            "then give the same command again"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandFailed(
                f"another command is grading {assignment}: wait until it ends"
            ) from None
        for leftover in folder.glob("*/*.part"):  # drafts of a command that was killed
            leftover.unlink(missing_ok=True)
        yield


def _name(outcome: Outcome) -> str:
    return Path(outcome.path).parents[1].name


def _remember(folders: Folders, outcome: Outcome) -> None:
    path = Path(outcome.path)
    note = folders.graded(path.parent.name, _name(outcome)) / "failed.txt"
    with contextlib.suppress(OSError):  # the disk may be full; the report names the failure anyway
        if outcome.failed:
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(f"{outcome.fault}: {outcome.failed}\n", encoding="utf-8")
        else:
            note.unlink(missing_ok=True)


def report(outcomes: Sequence[Outcome]) -> int:
    """Print what was graded and what was not; return the exit status."""
    failed = [outcome for outcome in outcomes if outcome.failed]
    graded = [outcome for outcome in outcomes if not outcome.failed]
    unchanged = sum(outcome.unchanged for outcome in graded)
    print(
        f"graded: {len(graded)} ({unchanged} of them unchanged since the last grading); "
        f"could not be graded: {len(failed)}"
    )
    if again := [_name(outcome) for outcome in graded if outcome.attempts > 1]:
        print(f"  tried again, because the machine had failed: {len(again)} ({', '.join(again)})")
    for outcome in graded:
        for note in outcome.notes:
            print(f"  {_name(outcome)}: {note}")
    for outcome in failed:
        print(f"  {_name(outcome)}: {outcome.fault}: {outcome.failed.splitlines()[-1]}")
    if any(outcome.fault == MACHINE for outcome in failed):
        print(TO_DO)
    return int(bool(failed))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options, which `regrade` has too."""
    add_assignment(parser)
    parser.add_argument(
        *("--jobs", "-j"),
        type=int,
        default=usable_cores(),
        help="submissions graded at the same time (default: %(default)s, one per core)",
    )
    parser.add_argument(
        "--launch",
        metavar="PREFIX",
        type=shlex.split,
        default=[],
        help="start each of --jobs workers by this command, on another machine that has the same "
        "folders, for example 'srun -n1 -c2 --mem 8G' or 'ssh node7' (default: workers run on this "
        "machine)",
    )
    add_students(parser)
    parser.add_argument(
        "--on",
        choices=("cpu", "gpu"),
        help="run a solution that passes on the simulated network again on real ranks, cpu (gloo) "
        "or gpu. With gpu, one submission at a time uses all GPUs of a machine (default: the "
        "setting in nbgrader_config.py)",
    )


def choices(root: Path, arguments: argparse.Namespace) -> tuple[Settings, dict[str, Any]]:
    """Return the settings, and the options for the workers."""
    settings = Settings.of(load_config(root))
    if arguments.on:
        settings = replace(settings, on=arguments.on)
    jobs = max(1, arguments.jobs)
    if settings.on == "gpu" and jobs > 1 and not arguments.launch:
        print("on GPUs, one submission is graded at a time: --jobs is ignored")
        jobs = 1
    return settings, {"jobs": jobs, "launch": arguments.launch}


def run(root: Path, arguments: argparse.Namespace) -> int:
    """Grade and book for the command line; return the exit status."""
    assignment = arguments.assignment
    settings, workers = choices(root, arguments)
    outcomes = grade_class(root, assignment, arguments.student, settings, **workers)
    unbooked = book_class(root, assignment, arguments.student, settings)
    status = report(outcomes)
    if unbooked:
        print(f"not booked: {', '.join(unbooked)}; the reasons are above")
        return 1
    return status
