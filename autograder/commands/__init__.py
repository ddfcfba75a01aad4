"""The commands of the program `autograder`, and what several of them share."""

from __future__ import annotations

import argparse
from typing import Any, TextIO

from autograder.errors import CommandFailed
from autograder.tables import plain_text


def add_assignment(parser: argparse.ArgumentParser) -> None:
    """Declare the argument ASSIGNMENT of the commands that need one."""
    parser.add_argument("assignment", help="the assignment's name, such as 02_data_parallel_sgd")


def add_students(parser: argparse.ArgumentParser) -> None:
    """Declare the option --student of the commands that may be about some of the class."""
    parser.add_argument(
        *("--student", "-s"),
        action="append",
        default=[],
        help="only this student; for several students, give the option several times",
    )


def must(outcome: dict[str, object], step: str) -> None:
    """Raise `CommandFailed` with nbgrader's words, if nbgrader could not do this."""
    if not outcome["success"]:
        raise CommandFailed(
            f"{step} failed: {outcome.get('error') or ''}\n{outcome.get('log') or ''}".rstrip()
        )


class PlainStream:
    """Standard output or error on which no student's text can control the terminal.

    Args:
        stream: the stream to which the text is written.

    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write the text, as `plain_text` returns it."""
        return self.stream.write(plain_text(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def print_step(task: str, number: int, total: int, note: str) -> None:
    """Say which of `total` things is done; `note` is about it, such as the student's name."""
    print(f"{task} {number} of {total}: {note}", flush=True)
