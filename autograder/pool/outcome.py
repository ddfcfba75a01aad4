"""What became of one submitted notebook, as a worker tells it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MACHINE, AUTHOR = "the machine", "the check"


@dataclass(frozen=True)
class Outcome:
    """What became of one submitted notebook: one line of JSON.

    Attributes:
        path: the submitted notebook.
        verdict: the verdict's path; empty if there is none.
        score: its points.
        max_score: those that it could have.
        seconds: that the examination took.
        unchanged: whether the verdict was there already.
        failed: why there is none, never because of the student; else empty.
        fault: whose: ``the machine``'s, and it may be tried again, or ``the check``'s.
        notes: what was damaged in the notebook as it was handed in, and what was done.

    """

    path: str
    verdict: str = ""
    score: float = 0.0
    max_score: float = 0.0
    seconds: float = 0.0
    unchanged: bool = False
    failed: str = ""
    fault: str = ""
    notes: Sequence[str] = ()
