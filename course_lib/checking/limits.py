"""The limits of a case: one table for a check in a notebook and for the grader.

The limits are far above what the course's own solutions need; the largest need of a solution is in
brackets. What the ranks of a case may ask of the grader's network has its own limits,
`autograder.examination.fabric.Bounds`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `cases` imports torch, which the limits do not need
    from course_lib.checking.cases import Check

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


def seconds_of(check: Check, case_seconds: float = CASE_SECONDS) -> float:
    """Return the time limit of one case; `case_seconds` if the check has no limit of its own."""
    return case_seconds if check.seconds is None else check.seconds
