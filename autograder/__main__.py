"""The command ``autograder``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from autograder.course import CourseNotFound, SourcesMissing, find_course


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
    course = argparse.ArgumentParser(add_help=False)
    course.add_argument(
        "--course", type=Path, help="the course folder (default: found from here upwards)"
    )
    demo = commands.add_parser(
        "demo",
        parents=[course],
        help="release an assignment, grade six submissions, write their feedback",
        description="Release an assignment, grade six submissions that differ in what is wrong "
        "with them, write their feedback, and print a table. Touches only grading/demo and "
        "grading/demo.json.",
    )
    demo.add_argument(
        "--on",
        choices=("cpu", "gpu"),
        default="",
        help="run what is right on the grader's network once more on real ranks, on gloo or GPUs; "
        "nbgrader autograde takes it as --Examine.on=cpu (default: no real ranks)",
    )
    release = commands.add_parser(
        "release",
        parents=[course],
        help="make assignments/, which students get, from instructor/",
        description="Make assignments/NN_name from instructor/NN_name: the notebook without "
        "solutions and mark schemes, and the files beside it without hidden.py and mutants.py. "
        "Refuses if a line of a solution would be seen. The same source gives the same bytes.",
    )
    release.add_argument(
        "assignment", nargs="*", help="its folder's name, as in 02_data_parallel_sgd (default: all)"
    )
    release.add_argument(
        "--check",
        action="store_true",
        help="change nothing; exit status 1 if assignments/ is not what instructor/ makes",
    )
    arguments = parser.parse_args()
    try:
        return _run(arguments, find_course(arguments.course))
    except (CourseNotFound, SourcesMissing) as error:
        print(f"autograder: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nautograder: interrupted; nothing is left running", file=sys.stderr)
        return 130


def _run(arguments: argparse.Namespace, root: Path) -> int:
    # Imported late: nbgrader needs a second, and --help does not need nbgrader.
    if arguments.command == "release":
        from autograder.commands.release import main as run_release

        return run_release(root, arguments.assignment, arguments.check)
    from autograder.commands.demo import main as run_demo

    return run_demo(root, arguments.on)


if __name__ == "__main__":
    sys.exit(main())
