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
        description="Bring your desk up to date: your copies of lectures and assignments. "
        "Your changes stay, and new versions are put beside them.",
    )
    parser.add_argument(
        "--desk", type=Path, help="the folder (default: the desk you are in, or the course's work)"
    )
    parser.add_argument(
        "--lab",
        nargs=argparse.REMAINDER,
        metavar="OPTION",
        help="then open JupyterLab on it; all options after this one go to JupyterLab",
    )
    arguments = parser.parse_args(words)
    desk = (arguments.desk or default_desk(COURSE)).resolve()
    if not (COURSE / "lectures").is_dir():
        print(
            f"desk: there are no lectures in {COURSE}. In the folder that you cloned, run: "
            "pip install -e .",
            file=sys.stderr,
        )
        return 2
    try:
        for note in refresh(COURSE, desk):
            print(f"desk: {note}", flush=True)
    except OSError as error:
        print(
            f"desk: {error.strerror}: {error.filename}. Make {desk} writable, or choose another "
            "folder with --desk.",
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
