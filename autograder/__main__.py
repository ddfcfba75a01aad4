"""The program ``autograder``: one command per module of `autograder.commands`."""

from __future__ import annotations

import argparse
import importlib
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from autograder import gradebook
from autograder.course import CourseNotFound, SourcesMissing, find_course, load_config

COMMANDS = {
    "demo": "release an assignment, grade six submissions, write their feedback",
    "leaderboard": "time the submissions of the capstone, write the board",
    "new": "write an assignment to begin with, which passes its tests and can be released",
    "release": "make assignments/, which students get, from instructor/",
    "collect": "take submissions from the exchange, a folder, or Moodle's or Canvas's zip",
    "grade": "grade all that was handed in, several at a time, and book it",
    "status": "what is handed in, graded, outdated, failed, booked",
    "regrade": "after a check was mended: old and new points side by side, before booking",
    "replay": "examine one submission again from its verdict, explained, with a timeline",
    "feedback": "write what each student reads about their submission",
    "export": "write grades as CSV for Canvas, Moodle, or a spreadsheet",
    "similar": "list solutions that look alike, side by side",
    "inquiries": "students' questions about their grades, and the answers",
}
"""What `autograder --help` says of each command. The module of that name in `autograder.commands`
has DESCRIPTION, `add_options(parser)` and `run(root, arguments) -> exit status`."""


_GRADEBOOK = {
    **dict.fromkeys(("status", "export"), False),
    **dict.fromkeys(("collect", "grade", "regrade", "release", "feedback"), True),
}
"""Commands that open the gradebook of the course: whether they write it."""


class _Version(argparse.Action):
    """argparse's own ``version`` takes a text; this one is found out only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from autograder.commands.version import version_text

        print(version_text())
        parser.exit()


def _in_the_way() -> str:
    """Return that a file is found in the place of a package, as a learner's torch.py may be."""
    for name in ("torch", "numpy", "nbgrader", "nbformat"):
        spec = PathFinder.find_spec(name)
        if spec is not None and spec.submodule_search_locations is None:
            return (
                f"{spec.origin} is in the way of the package {name}: rename that file, or take its "
                "folder out of PYTHONPATH"
            )
    return ""


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
    course = argparse.ArgumentParser(add_help=False)
    course.add_argument(
        "--course", type=Path, help="the course folder (default: found from here upwards)"
    )
    module: ModuleType | None = None
    for name, told in COMMANDS.items():
        command = commands.add_parser(name, parents=[course], help=told)
        if name in sys.argv[1:2]:  # only now: nbgrader needs a second, and --help no nbgrader
            if in_the_way := _in_the_way():
                print(f"autograder: {in_the_way}", file=sys.stderr)
                return 2
            module = importlib.import_module(f"autograder.commands.{name}")
            command.description = module.DESCRIPTION
            module.add_options(command)
    arguments = parser.parse_args()
    try:
        assert module is not None  # argparse knows no other commands
        root = find_course(arguments.course)
        if arguments.command in _GRADEBOOK:
            url = str(load_config(root).CourseDirectory.db_url)
            gradebook.make_sure_of(url, writes=_GRADEBOOK[arguments.command])
        return int(module.run(root, arguments))
    except (CourseNotFound, SourcesMissing, gradebook.GradebookUnusable) as error:
        print(f"autograder: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        if not type(error).__module__.startswith("sqlalchemy."):  # loaded by few commands
            raise
        said = getattr(error, "orig", None) or error
        url = str(load_config(root).CourseDirectory.db_url)
        print(f"autograder: {gradebook.told(said, url)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nautograder: interrupted; nothing is left running", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
