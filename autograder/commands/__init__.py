"""The commands of the program `autograder`, and what several of them share."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any, TextIO

from autograder.errors import CommandFailed
from autograder.tables import plain_text

_WIDTH = 24
_LINE_EVERY = 10.0


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


class Progress:
    """Shows progress over `total` things, one `step` each: on a terminal a bar, else lines.

    Args:
        task: the task, in a word.
        total: number of things.

    """

    def __init__(self, task: str, total: int) -> None:
        self._task, self._total, self._done = task, total, 0
        self._start = self._shown = time.monotonic()

    def step(self, note: str = "") -> None:
        """Count one more thing, and print the `note` on a line of its own."""
        self._done += 1
        now, last = time.monotonic(), self._done == self._total
        out, is_terminal = sys.stdout, sys.stdout.isatty()
        if isinstance(out, PlainStream):  # the bar is drawn with codes of our own
            out, note = out.stream, plain_text(note)
        if note:
            out.write("\r\x1b[K" * is_terminal + f"{note}\n")
        if is_terminal:
            filled = _WIDTH * self._done // self._total
            bar = "█" * filled + "░" * (_WIDTH - filled)
            out.write(f"\r\x1b[K{self._task} {bar} {self._text(now)}" + "\n" * last)
        elif last or now - self._shown >= _LINE_EVERY:
            self._shown = now
            out.write(f"{self._task}: {self._text(now)}\n")
        out.flush()

    def _text(self, now: float) -> str:
        took = now - self._start
        left = (self._total - self._done) * took / self._done
        end = f"{_in_words(left)} left" if left else _in_words(took)
        return f"{self._done}/{self._total}, {end}"


def _in_words(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
