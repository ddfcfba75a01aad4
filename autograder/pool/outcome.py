"""The outcome of one submitted notebook, as a worker reports it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MACHINE, AUTHOR = "the machine failed", "the check is broken"


@dataclass(frozen=True)
class Outcome:
    """The outcome of one submitted notebook, which is sent as one line of JSON.

    Attributes:
        path: the submitted notebook.
        verdict: the verdict's path; empty if there is none.
        score: its points.
        max_score: the points that it could get.
        seconds: duration of the examination.
        unchanged: whether the verdict existed already.
        failed: why there is no verdict, or an empty string. The student is never the reason.
        fault: `MACHINE`, if another attempt may succeed, or `AUTHOR`.
        everywhere: whether the machine failed before it examined this submission, and so would
            fail for others, too.
        notes: damage in the submitted notebook, and what was done about it.
        attempts: number of attempts; more than one only if the machine failed.

    """

    path: str
    verdict: str = ""
    score: float = 0.0
    max_score: float = 0.0
    seconds: float = 0.0
    unchanged: bool = False
    failed: str = ""
    fault: str = ""
    everywhere: bool = False
    notes: Sequence[str] = ()
    attempts: int = 1
