"""Show the progress of a long task: a bar with the time left, or a line now and then."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_WIDTH = 24
_LINE_EVERY = 10.0


class Progress:
    """Shows progress over `total` things, one `step` each.

    Args:
        what: the task, in a word.
        total: number of things.
        out: the stream; a terminal gets a bar, any other stream gets lines.

    """

    def __init__(self, what: str, total: int, out: TextIO | None = None) -> None:
        self._what, self._total = what, total
        self._out = out or sys.stdout
        self._bar = self._out.isatty()
        self._done = self._free = 0
        self._start = self._told = time.monotonic()

    def step(self, free: bool = False, note: str = "") -> None:
        """Count one more thing.

        `free` means that it took no work. A `note` is printed on its own line.
        """
        self._done += 1
        self._free += free
        now = time.monotonic()
        if note:
            self.line(note)
        last = self._done == self._total
        if self._bar:
            filled = _WIDTH * self._done // self._total
            bar = "█" * filled + "░" * (_WIDTH - filled)
            self._out.write(f"\r\x1b[K{self._what} {bar} {self._text(now)}" + "\n" * last)
        elif last or now - self._told >= _LINE_EVERY:
            self._told = now
            self._out.write(f"{self._what}: {self._text(now)}\n")
        self._out.flush()

    def line(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        self._out.write("\r\x1b[K" * self._bar + f"{text}\n")

    def _text(self, now: float) -> str:
        worked, took = self._done - self._free, now - self._start
        text = f"{self._done}/{self._total}"
        if worked and took > 0:
            text += f", {60 * worked / took:.3g} per minute"
            if left := (self._total - self._done) * took / worked:
                text += f", {in_words(left)} left"
        if self._done == self._total:
            text += f", {in_words(took)}"
        return text


def in_words(seconds: float) -> str:
    """Return a duration in words."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
