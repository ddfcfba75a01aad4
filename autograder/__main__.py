"""The command ``autograder``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from autograder.course import CourseNotFound, find_course


class _Version(argparse.Action):
    """argparse's own ``version`` takes a text; this one is found out only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from autograder.commands.version import version_text

        print(version_text())
        parser.exit()


def main() -> int:
    """Parse the command line and run the command; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="autograder",
        description="Grade notebooks of data-parallel code, on several ranks, in a sandbox.",
        epilog="Plain nbgrader commands work too, in the course folder: nbgrader autograde …",
    )
    parser.add_argument(
        "--version",
        action=_Version,
        nargs=0,
        help="show the versions of the course, torch, nbgrader and the sandbox's bubblewrap",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="release an assignment, grade six submissions, write their feedback",
        description="Release an assignment, grade six submissions that differ in what is wrong "
        "with them, write their feedback, and print a table. Touches only grading/demo and "
        "grading/demo.json.",
    )
    demo.add_argument(
        "--course", type=Path, help="the course folder (default: found from here upwards)"
    )
    arguments = parser.parse_args()
    try:
        root = find_course(arguments.course)
        from autograder.commands.demo import main as run_demo  # nbgrader needs a second to import

        return run_demo(root)
    except CourseNotFound as error:
        print(f"autograder: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nautograder: interrupted; nothing is left running", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
