"""Show a line that says what a long call is doing."""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from course_lib.ranks.output.printer import in_notebook

_AFTER = 1.0
_EVERY = 0.5


class Line:
    """A line that changes and then vanishes.

    In a notebook it is one output. In a terminal it overwrites itself. If output goes to a file,
    nothing is shown.
    """

    def __init__(self) -> None:
        self._handle: Any = None
        self._terminal = False

    def show(self, text: str, html: str = "") -> None:
        """Show a text in place of the last one; a notebook shows HTML, if there is any."""
        if in_notebook():
            from IPython.display import display

            bundle = {"text/plain": text} | ({"text/html": html} if html else {})
            if self._handle is None:
                self._handle = display(bundle, raw=True, display_id=True)
            else:
                self._handle.update(bundle, raw=True)
        elif sys.stderr.isatty():
            self._terminal = True
            room = shutil.get_terminal_size().columns - 1
            print(f"\r\033[K{text[:room]}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the line."""
        if self._handle is not None:
            self._handle.update({}, raw=True)
            self._handle = None
        self.end()

    def end(self) -> None:
        """Remove the line from a terminal, in which something else is to be printed."""
        if self._terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
            self._terminal = False


class Progress(Line):
    """A line that appears when a call that began at `start` has taken a second.

    In a notebook that runs without a person, nothing is shown.
    """

    def __init__(self, start: float) -> None:
        super().__init__()
        self._start = start
        self._next = start + _AFTER

    def due(self) -> bool:
        """Return whether it is time for the next update."""
        return time.monotonic() >= self._next

    def update(self, doing: Iterable[str]) -> None:
        """Show how long the call has run, and what the ranks do; `doing` has a phrase for each."""
        now = time.monotonic()
        self._next = now + _EVERY
        if not in_notebook() or _watched():
            self.show(f"{now - self._start:.0f} s · {summary(doing)}")


def _watched() -> bool:
    """Return whether a person may be looking: nbclient and similar tools do not allow stdin.

    Without a person, the line must not appear: Jupyter cannot remove an output but only empty it,
    and the empty output would be saved.
    """
    from IPython.core.getipython import get_ipython

    kernel = getattr(get_ipython(), "kernel", None)
    return bool(getattr(kernel, "_allow_stdin", True))


def summary(doing: Iterable[str]) -> str:
    """Return what the ranks do, in one line: ``3 × waits in all_reduce #7, 1 × running``."""
    return ", ".join(f"{count} × {activity}" for activity, count in Counter(doing).most_common())
