"""The time that one submission may take: per case, per check, and in all."""

from __future__ import annotations

import time
from dataclasses import dataclass

from course_lib.ranks.explain.errors import RanksError


class OutOfTime(RanksError):
    """The submission, or one check of it, has used up its time; nothing more is run."""


@dataclass(frozen=True)
class Limits:
    """Seconds, on the wall clock.

    Attributes:
        cell: of one cell of the notebook.
        case: of one case; a check may ask for less.
        timeouts: after so many cases that took too long, a check's others are not run.
        submission: of everything that student code does.

    """

    cell: float = 30.0
    case: float = 10.0
    timeouts: int = 2
    submission: float = 60.0


class Budget:
    """What is left of a submission's time. The clock runs only while student code does.

    Attributes:
        limits: the limits.
        used: seconds so far.

    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.used = 0.0
        self._since: float | None = None

    def __enter__(self) -> Budget:
        """Let the clock run."""
        self._since = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        if self._since is not None:
            self.used += time.monotonic() - self._since
        self._since = None

    @property
    def left(self) -> float:
        """Seconds that the submission still has."""
        running = 0.0 if self._since is None else time.monotonic() - self._since
        return self.limits.submission - self.used - running

    def of(self, seconds: float) -> float:
        """Return how long something may take that has a limit of `seconds` of its own.

        Raises:
            OutOfTime: nothing is left.

        """
        if self.left <= 0:
            raise OutOfTime(
                f"The submission has used up its {self.limits.submission:g} s: this was not run."
            )
        return min(seconds, self.left)
