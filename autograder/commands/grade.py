"""``autograder grade``: grade a class in many processes, then write the gradebook.

The first phase examines each submission and writes its verdict to disk, in a file named by its
content. In the second phase, one process writes the verdicts to the gradebook through nbgrader. If
the command is killed at any moment, it continues from there at the next run.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

from autograder.commands import add_assignment
from autograder.course import Settings, load_config
from autograder.pool import phases

DESCRIPTION = (
    "Grade all submissions of an assignment, several at a time, and book their points. A "
    "submission that was already graded with the same code and the same checks is not run again. "
    "A command that was killed or interrupted continues where it was. If the machine "
    "fails, nobody gets a zero: the submission is tried three times. If all three fail, the "
    "command lists the submission, and its exit status is 1."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options, which `regrade` has too."""
    add_assignment(parser)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser.add_argument(
        *("--jobs", "-j"),
        type=_positive,
        default=cores or 1,
        help="submissions graded at the same time (default: %(default)s, one per core)",
    )
    parser.add_argument(
        *("--student", "-s"),
        action="append",
        default=[],
        help="grade only this student; for several students, give the option several times",
    )
    parser.add_argument(
        "--on",
        choices=("cpu", "gpu"),
        help="if a solution passes on the simulated network, run it again on real ranks: cpu "
        "(gloo) or gpu; with gpu, one submission at a time uses all GPUs "
        "(default: the setting in nbgrader_config.py)",
    )


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of submissions, 1 or more")
    return int(text)


def choices(root: Path, arguments: argparse.Namespace) -> tuple[Settings, int]:
    """Return the settings and the number of jobs."""
    settings = Settings.of(load_config(root))
    if arguments.on:
        settings = replace(settings, on=arguments.on)
    jobs = arguments.jobs
    if settings.on == "gpu" and jobs > 1:
        print("on GPUs, one submission is graded at a time: --jobs is ignored")
        jobs = 1
    return settings, jobs


def run(root: Path, arguments: argparse.Namespace) -> int:
    """Grade and book for the command line; return the exit status."""
    assignment = arguments.assignment
    settings, jobs = choices(root, arguments)
    outcomes = phases.grade_class(root, assignment, arguments.student, settings, jobs=jobs)
    unbooked = phases.book_class(root, assignment, arguments.student, settings)
    status = phases.report(outcomes)
    if unbooked:
        print(f"not booked: {', '.join(unbooked)}; the reasons are above")
        return 1
    return status
