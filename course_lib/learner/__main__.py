"""The program ``course``: one command per module of `course_lib.learner`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from course_lib._later import without
from course_lib.learner import CannotGoOn
from course_lib.learner.program import parse

COMMANDS = {
    "start": "make your own copy of an assignment",
    "check": "run your copy's cells and checks from the top, and count the points",
    "progress": "show your points and predictions so far",
    "solution": "ask whether you are sure, and show the solution of a task",
    "lab": "open JupyterLab on your copies",
    "doctor": "check whether this machine has what the course needs",
}
"""The line of `course --help` for each command. The module of that name also has
`run(arguments) -> exit status`; see `program`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run the command; return the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(
        prog="course", description="Work through the course: from mini-batch SGD to DDP."
    )
    without("rfc3987_syntax")
    try:
        module, arguments = parse(parser, "course_lib.learner", COMMANDS, argv or ["--help"])
        return int(module.run(arguments))
    except ModuleNotFoundError as error:
        _say(f"the package {error.name!r} is missing: the installation is incomplete", argv)
        return 2
    except CannotGoOn as error:
        print(f"course {argv[0]}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # who reads the output, as `head`, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except OSError as error:
        about = f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror)
        _say(about, argv)
        return 2
    except KeyboardInterrupt:
        print("\ncourse: interrupted; no process is left running", file=sys.stderr)
        return 130


def _say(problem: str, argv: Sequence[str]) -> None:
    advice = "" if argv[:1] == ["doctor"] else ". `course doctor` says what to do"
    print(f"course: {problem}{advice}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
