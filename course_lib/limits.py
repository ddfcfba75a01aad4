"""The limits of checks and of notebook cells: one table for the student's side and for the grader.

The limits of a case are far above what the course's own solutions need; the largest need of a
solution is in brackets. What the ranks of a case may ask of the grader's network has its own
limits, `autograder.examination.fabric.Bounds`. The limit of a submission's memory is in
`autograder.course`.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

CASE_SECONDS = 10.0
"""Seconds of one case, unless its check has its own limit. The grader does not count seconds during
which the ranks wait for a core."""
MAX_TIMEOUTS = 2
"""After this many cases that exceeded their time, the rest of a check is not run."""
MAX_EMPTY = 64
"""Operations without a single byte, of one rank in one case (8). The limits on bytes bound the
information that ranks can exchange; the order and the timing of empty operations would be free."""
MAX_TEXT = 64 * 1024
"""Characters of one text from a process that runs student code: an output or a traceback."""
MAX_DETAIL = 16 * 1024
"""Characters of a report's text about one case."""

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
