"""The program ``autograder``: one command per module of `autograder.commands`."""

from __future__ import annotations

import argparse
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TextIO, cast

from autograder import gradebook
from autograder.commands import PlainStream
from autograder.course import find_course, load_config
from autograder.errors import CommandFailed, SandboxUnavailable
from course_lib.learner.program import parse

COMMANDS = {
    "demo": "release an assignment, grade six submissions and write their feedback",
    "doctor": "check whether this machine can grade, and say what to do if not",
    "leaderboard": "write the leaderboard of the capstone, from the verdicts of the class",
    "new": "write a first version of a new assignment, which passes its tests and can be released",
    "release": "make the notebooks that students get, in assignments/, from instructor/",
    "collect": "take submissions from the exchange, a folder, or a learning system's zip",
    "grade": "grade all submissions, several at a time, and book the points in the gradebook",
    "status": "show how many submissions are graded, outdated, failed and booked",
    "regrade": "grade again after you mended a check, and compare the points; or explain one grade",
    "feedback": "write the page that each student reads about their submission",
    "report": "show how the class did: points per task, frequent reasons",
    "export": "write grades as CSV for Canvas, Moodle, or a spreadsheet",
    "sources": "write each student's own code as a .py file, for programs that find copies",
}
"""Each command's line in `autograder --help`. The module of that name in `autograder.commands` also
has `run(root, arguments) -> exit status`, which may raise `CommandFailed`; see `program`."""


_GRADEBOOK = {
    **dict.fromkeys(("status", "export", "report"), False),
    **dict.fromkeys(("collect", "grade", "regrade", "release", "feedback"), True),
}
"""The commands that open the gradebook of the course → whether they write to it."""


class _Version(argparse.Action):
    """Like argparse's own ``version``, but compute the text only if the user asks for it."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from autograder.examination.verdict import versions
        from autograder.sandbox.bubblewrap import probe

        for name, version in versions().items():
            print(name, version)
        try:
            print("bubblewrap", probe())
        except SandboxUnavailable as error:
            print(f"no sandbox: {error}")
        parser.exit()


def main() -> int:
    """Run the command line; return the exit status. No student's text controls the terminal."""
    out, err = (cast(TextIO, PlainStream(stream)) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        return _run()


def _run() -> int:
    """Parse the command line and run the command."""
    parser = argparse.ArgumentParser(
        prog="autograder",
        description="Grade notebooks of data-parallel code, on several ranks, in a sandbox.",
        epilog="Plain nbgrader commands work too, in the course folder: nbgrader autograde …",
    )
    parser.add_argument(
        "--version",
        action=_Version,
        nargs=0,
        help="show the versions of the course, torch and nbgrader, and the bubblewrap that is used",
    )
    course = argparse.ArgumentParser(add_help=False)
    course.add_argument(
        "--course", type=Path, help="the course folder (default: this folder or one above it)"
    )
    module, arguments = parse(
        parser, "autograder.commands", COMMANDS, sys.argv[1:] or ["--help"], parents=[course]
    )
    try:
        # This warning is nbgrader's own: SQLAlchemy flushes objects that were not added yet.
        warnings.filterwarnings("ignore", module="nbgrader.api")
        root = find_course(arguments.course)
        if arguments.command in _GRADEBOOK:
            url = str(load_config(root).CourseDirectory.db_url)
            gradebook.make_sure_of(url, writes=_GRADEBOOK[arguments.command])
        return int(module.run(root, arguments))
    except CommandFailed as error:
        print(f"autograder {arguments.command}: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        if not type(error).__module__.startswith("sqlalchemy."):  # few commands import it
            raise
        database_error = getattr(error, "orig", None) or error  # SQLite's
        url = str(load_config(root).CourseDirectory.db_url)
        print(f"autograder: {gradebook.sentence_on(database_error, url)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nautograder: interrupted; no process is left running", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
