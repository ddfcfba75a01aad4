"""The time that a notebook's cells have, in ``course check`` as in the grader."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

CELL_SECONDS = 30.0
"""Of one cell."""
CELLS_SECONDS = 60.0
"""Of all solutions together (in the grader with their checks), and again of all other cells."""
SOLUTIONS, OTHERS = "solutions", "other cells"
"""The two kinds of cells that share their time."""
BRIEFLY = 1.0
"""Of each other cell after all their time is used up, because it may define what is needed."""
INTERRUPT_SECONDS = 2.0
"""Of an interrupted cell, to end."""


def limit_of(kind: str, left: float) -> float:
    """Return the seconds that a cell has if these are left for its kind of cells."""
    return min(CELL_SECONDS, max(left, BRIEFLY if kind == OTHERS else 0.0))


def clock_of(pid: int) -> float:
    """Return a clock in seconds that stands still while this process waits for a core.

    It goes on meanwhile where Linux does not tell.
    """
    waited = 0
    with contextlib.suppress(OSError, IndexError):
        waited = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1])
    return time.monotonic() - waited / 1e9
