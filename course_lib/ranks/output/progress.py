"""Show a line that says what a long call is doing."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from course_lib.ranks.output.printer import in_notebook

_AFTER = 1.0
_EVERY = 0.5


class Progress:
    """A line that appears when a call that began at `start` has taken a second, and then vanishes.

    In a notebook it is one output that changes. In a terminal it is a line that overwrites itself.
    If output goes to a file, or to a notebook that runs without a person, nothing is shown.
    """

    def __init__(self, start: float) -> None:
        self._start = start
        self._next = start + _AFTER
        self._handle: Any = None
        self._terminal = False

    def due(self) -> bool:
        """Return whether it is time for the next update."""
        return time.monotonic() >= self._next

    def update(self, doing: Iterable[str]) -> None:
        """Show how long the call has run, and what the ranks do; `doing` has a phrase for each."""
        now = time.monotonic()
        self._next = now + _EVERY
        text = f"{now - self._start:.0f} s · {summary(doing)}"
        if in_notebook():
            if not _watched():
                return
            from IPython.display import display

            bundle = {"text/plain": text}
            if self._handle is None:
                self._handle = display(bundle, raw=True, display_id=True)
            else:
                self._handle.update(bundle, raw=True)
        elif sys.stderr.isatty():
            self._terminal = True
            print(f"\r\033[K{text[:100]}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the line."""
        if self._handle is not None:
            self._handle.update({}, raw=True)
            self._handle = None
        if self._terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
            self._terminal = False


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
