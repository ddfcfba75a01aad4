"""``python -m course_lib.desk``: bring the student's desk up to date, and open JupyterLab on it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from course_lib.desk.lab import NoHome, open_lab
from course_lib.desk.places import default_desk, find_course
from course_lib.desk.refresh import refresh

COURSE = find_course()


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line and do it; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m course_lib.desk",
        description="Bring your desk up to date: copies of lectures and assignments to work in. "
        "What you changed stays, and new versions are laid beside it.",
    )
    parser.add_argument(
        "--desk", type=Path, help="the folder (default: the one around here, or the course's work)"
    )
    parser.add_argument(
        "--lab",
        nargs=argparse.REMAINDER,
        metavar="OPTION",
        help="then open JupyterLab on it; all that follows are JupyterLab's options",
    )
    arguments = parser.parse_args(words)
    desk = (arguments.desk or default_desk(COURSE)).resolve()
    if not (COURSE / "lectures").is_dir():
        print(
            f"desk: there are no lectures in {COURSE}; install the course from the folder that "
            "you cloned, with pip install -e .",
            file=sys.stderr,
        )
        return 2
    try:
        for note in refresh(COURSE, desk):
            print(f"desk: {note}", flush=True)
    except OSError as error:
        print(
            f"desk: {error.strerror}: {error.filename}; make {desk} writable, or give another "
            "folder with --desk",
            file=sys.stderr,
        )
        return 1
    if arguments.lab is not None:
        try:
            open_lab(desk, arguments.lab)
        except NoHome as error:
            print(f"desk: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
