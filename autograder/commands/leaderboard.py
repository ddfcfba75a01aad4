"""``autograder leaderboard``: time the class's submissions of the capstone and show the board.

Each submission's code runs in the sandbox and writes the tapes of its ranks. The referee plays the
tapes in a separate cell of the sandbox, on draws that no submission has seen. Measured times are
kept. So after an interruption, or after new submissions, only entries without a time run. An entry
that ran out of time runs again only with a larger limit.
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from autograder.course import find_sources, handed_out, load_config
from autograder.examination.budget import Limits
from autograder.files import write_whole
from autograder.foreign_text import printable
from autograder.leaderboard.entries import FAILED, Entry, Store, ranked
from autograder.leaderboard.page import page, table
from autograder.leaderboard.timing import (
    Meeting,
    Unreadable,
    digest_of,
    read_released,
    sources_of,
    time_submission,
)
from autograder.passes.examine import masked_from
from autograder.pool.progress import in_words
from autograder.sandbox.look import ready
from autograder.sandbox.place import MachineFailure, SandboxedPlace
from autograder.sandbox.unavailable import SandboxUnavailable
from autograder.settings import ATTEMPTS
from course_lib.checking.local import load_module

ASSIGNMENT = "10_capstone"
DESCRIPTION = (
    "Time every submission of the capstone on the virtual clock and write a page and a CSV: place, "
    "score, bytes, gradients, distance from the speed of light. An interrupted run continues where "
    "it was. Changed submissions are timed again, and also those that ran out of time, if "
    "--seconds is larger now."
)


class BoardError(RuntimeError):
    """The board cannot be made; the message says what to do."""


def leaderboard(
    root: Path,
    *,
    final: bool = False,
    submitted: Path | None = None,
    to: Path | None = None,
    plays: int = 3,
    seconds: float = 60.0,
    again: bool = False,
    say: Callable[[str], None] = print,
) -> list[Entry]:
    """Time the submissions, write page and CSV, return the entries in order.

    Args:
        root: the course folder.
        final: use the hidden network instead of the one that students know.
        submitted: folder of ``STUDENT/10_capstone/10_capstone.ipynb``; by default nbgrader's.
        to: folder of the board; by default ``grading/leaderboard``.
        plays: number of draws; an entry must reach the target on each.
        seconds: wall-clock limit for a submission's ranks to write their tapes.
        again: forget measured times, and draw again.
        say: called with one line for each entry.

    Raises:
        SourcesMissing: this copy of the course lacks ``instructor/``.
        SandboxUnavailable: there is no sandbox, so no student's code is run.
        BoardError: there is nothing to time, or the file of measured times cannot be read.

    """
    source = find_sources(root) / ASSIGNMENT
    hidden = load_module(source / "hidden.py", handed_out(source))
    checks = load_module(handed_out(source) / "checks.py")
    check, case = checks.CHECKS["train"], hidden.FINAL if final else checks.RACE
    if submitted is None:
        submitted = root / load_config(root).CourseDirectory.submitted_directory
    target, stem = to or root / "grading" / "leaderboard", "final" if final else "leaderboard"
    kept = target / f"{stem}.json"
    if again:
        kept.unlink(missing_ok=True)
    try:
        store = Store(kept, secrets.token_hex(16))
    except ValueError as error:
        raise BoardError(str(error)) from None
    limits = Limits(cell=30, case=seconds, submission=seconds + 60)
    released = read_released(root / "assignments" / ASSIGNMENT / f"{ASSIGNMENT}.ipynb")
    meeting = Meeting(case, replace(check, seconds=seconds), released, store.seed, plays, limits)
    names = sorted(path.name for path in submitted.glob("*") if (path / ASSIGNMENT).is_dir())
    if not names:
        raise BoardError(
            f"nobody has submitted {ASSIGNMENT}: there is no {submitted}/NAME/{ASSIGNMENT}"
        )
    title = f"The race: {'final results' if final else 'results so far'}"
    with SandboxedPlace(masked_from(hidden.MASKED)) as place:
        ready(place)
        try:
            _time_all(names, submitted, meeting, place, store, say)
        finally:  # even after an interruption, show the measured times
            entries = ranked(store.entries[name] for name in names if name in store.entries)
            shown = page(entries, meeting.race, title, plays)
            write_whole(target / f"{stem}.html", shown, errors="replace")
            write_whole(target / f"{stem}.csv", table(entries), errors="replace")
    return entries


def _time_all(
    names: list[str],
    submitted: Path,
    meeting: Meeting,
    place: SandboxedPlace,
    store: Store,
    say: Callable[[str], None],
) -> None:
    began, timed = time.monotonic(), 0
    for number, name in enumerate(names, 1):
        path = submitted / name / ASSIGNMENT / f"{ASSIGNMENT}.ipynb"
        try:
            sources = sources_of(path, meeting.released)
        except Unreadable as error:
            store.keep(Entry(name, "", FAILED, str(error)))
            say(f"{number} of {len(names)}: {_shown(name)}: {error}")
            continue
        known = store.known(name, digest_of(sources, meeting), meeting.limits.case)
        if known is not None:
            say(f"{number} of {len(names)}: {_shown(name)}: {_told(known)} (known)")
            continue
        try:
            entry = _timed(name, sources, meeting, place)
        except MachineFailure as error:
            told = f"the machine failed {ATTEMPTS} times, so there is no entry: {error}"
            say(f"{number} of {len(names)}: {_shown(name)}: {_shown(told)}")
            continue
        store.keep(entry)
        timed += 1
        each = (time.monotonic() - began) / timed
        left = each * (len(names) - number)
        wait = f"; about {in_words(left)} left" if left else ""
        say(f"{number} of {len(names)}: {_shown(name)}: {_told(entry)}{wait}")


def _timed(
    name: str, sources: list[tuple[int, str]], meeting: Meeting, place: SandboxedPlace
) -> Entry:
    for _ in range(ATTEMPTS - 1):
        place.warm()
        with contextlib.suppress(MachineFailure):
            return time_submission(name, sources, meeting, place)
    place.warm()
    return time_submission(name, sources, meeting, place)


def _told(entry: Entry) -> str:
    if entry.status == "timed":
        return f"{1e3 * entry.seconds:.3f} ms, {entry.distance:.2f} × the speed of light"
    return f"{entry.status}: {_shown(entry.note)}"


def _shown(text: str) -> str:
    return printable(text)[:200]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--final",
        action="store_true",
        help="make the final leaderboard, with the hidden network and model",
    )
    parser.add_argument(
        "--submitted",
        type=Path,
        help=f"folder with NAME/{ASSIGNMENT}/{ASSIGNMENT}.ipynb (default: grading/submitted)",
    )
    parser.add_argument(
        "--to", type=Path, help="folder of the leaderboard (default: grading/leaderboard)"
    )
    parser.add_argument(
        "--plays",
        type=int,
        default=3,
        help="number of random draws of the problem; an entry must reach the target on each "
        "(default: 3)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="wall-clock limit for a submission's code; not part of the score (default: 60)",
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="delete the known times, draw a new seed, and time all submissions again",
    )


def run(root: Path, arguments: argparse.Namespace) -> int:
    """Make the board for the command line; return the exit status."""
    to = arguments.to or root / "grading" / "leaderboard"
    if arguments.plays < 1 or not arguments.seconds > 0:
        print("autograder leaderboard: --plays and --seconds must be above 0", file=sys.stderr)
        return 2
    try:
        entries = leaderboard(
            root,
            final=arguments.final,
            submitted=arguments.submitted,
            to=to,
            plays=arguments.plays,
            seconds=arguments.seconds,
            again=arguments.again,
            say=lambda line: print(line, flush=True),
        )
    except (BoardError, SandboxUnavailable) as error:
        print(f"autograder leaderboard: {error}", file=sys.stderr)
        return 1
    timed = sum(entry.status == "timed" for entry in entries)
    stem = "final" if arguments.final else "leaderboard"
    print(
        f"{timed} of {len(entries)} entries reached the target; the results are in "
        f"{to / stem}.html and {stem}.csv"
    )
    return 0
