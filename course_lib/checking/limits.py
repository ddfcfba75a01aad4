"""The limits of a case: one table for a check in a notebook and for the grader.

They are far above what the course's own solutions need (in brackets, the most that one takes) and
far below what would hurt the process that carries the messages of ranks it does not trust.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from course_lib.ranks.for_graders import Bounds

if TYPE_CHECKING:  # it imports torch, which is not needed to know the limits
    from course_lib.checking.cases import Check

CASE_SECONDS = 10.0
"""Seconds of one case, unless its check asks for others. In the grader those count during which the
ranks do not wait for a core."""
MAX_TIMEOUTS = 2
"""After so many cases that outran their time, the rest of a check is not run."""
MAX_EMPTY = 64
"""Operations of one rank without a single byte, in one case (8). Counted bytes bound what ranks
can tell one another; the order and the moment of what has none would be free."""
MAX_TEXT = 64 * 1024
"""Characters of what one process of a student's says at once: an output, a traceback."""
MAX_DETAIL = 16 * 1024
"""Characters of what a report says of one case."""
MAX_ANSWERS = 128 * 2**20
"""Bytes of what the ranks of a case return, together (1 MB)."""

CARRIED = Bounds(
    frame=64 * 2**20,
    held=256 * 2**20,
    open=4096,
    operations=20_000,
    frames=100_000,
    groups=256,
    text=256,
)
"""What the examiner carries in one case. (8.3 MB at once; one rank has 601 operations, 28 of them
at once, asks 1212 things, and makes 3 groups.)"""


def seconds_of(check: Check, case_seconds: float = CASE_SECONDS) -> float:
    """Return the time limit of one case of a check; `case_seconds` where it has none of its own."""
    return case_seconds if check.seconds is None else check.seconds
