"""Limit the time that one submission may take: per cell, per case, and in all.

Cells with solutions and the checks share one limit. The student's other cells have as much time
again, so that exploration costs no points.

The rule for every limit: **wall-clock time counts, except while the submission waits for a core.**
A submission that computes, sleeps or is stuck uses up its time. A submission that waits for a core
because the machine is busy does not. So the same code gets the same verdict even if it gets only a
tenth of the machine.

Nobody can cheat by waiting. The time that all processes of the submission run on cores always
counts. So a submission gains nothing if it fills the queue of the cores itself. A tenth of the
wall-clock time always counts too, so nothing lasts longer than ten times its limit. If a submission
gets that far, the verdict's notes have its numbers.

Time in which the machine stood still does not count at all. The machine stands still if a process
of the submission was stopped from outside, or if this process was not run. After `STANDSTILL`
seconds of standstill, the examination ends as a failure of the machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from autograder.course import Settings
from autograder.sandbox.cores import Cores
from autograder.sandbox.sandbox import MachineFailure
from course_lib.ranks.explain.errors import RanksError

PATIENCE = 10
"""One counted second lasts at most this many seconds of wall-clock time."""
LOOK_EVERY = 0.2
"""Seconds between two readings of values that must be polled, such as core times."""
UNSEEN = 3.0
"""A gap of more seconds between two readings, without computing or queuing, is a standstill."""
STANDSTILL = 60.0
"""Seconds that the machine may stand still in one examination."""


class SubmissionError(RanksError):
    """The submission's own code prevented a case from being run at all."""

    @property
    def in_short(self) -> str:  # type: ignore[override]
        return self.summary


class OutOfTime(SubmissionError):
    """The submission, or one check of it, has used up its time; nothing more is run."""


class Budget:
    """The time that a submission has left. The clock runs only while student code runs.

    The clock stops before processes are ended, because Linux knows how long a process waited only
    while the process exists.

    Args:
        settings: the limits, in counted seconds: of a cell, of a case, of the submission.
        cores: returns the core times so far, by pid, of the submission's processes and of those
            processes of ours for which they wait.
        wall: the wall clock.
        busy: returns the seconds that this process has computed so far.

    Attributes:
        settings: the limits.
        used: seconds that have counted so far, at the last reading.
        waited: wall-clock seconds that did not count because the submission waited for a core.
        still: wall-clock seconds that did not count because the machine stood still.

    """

    def __init__(
        self,
        settings: Settings,
        cores: Callable[[], Mapping[int, Cores]] = dict,
        wall: Callable[[], float] = time.monotonic,
        busy: Callable[[], float] = time.process_time,
    ) -> None:
        self.settings = settings
        self.used = self.waited = self.still = 0.0
        self._cores, self._wall, self._busy = cores, wall, busy
        self._looked: float | None = None
        self._was_busy = 0.0
        self._seen: Mapping[int, Cores] = {}

    def __enter__(self) -> Budget:
        """Start the clock."""
        self._looked, self._seen, self._was_busy = self._wall(), self._cores(), self._busy()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self._look()
        except MachineFailure:
            if kind is None:  # otherwise, the other exception says more
                raise
        finally:
            self._looked = None

    @property
    def left(self) -> float:
        """Seconds that the submission still has."""
        return self.until(self.settings.submission_seconds)

    @property
    def now(self) -> float:
        """The value of `used` if all time since the last reading counts."""
        return self.used + self._since

    @property
    def _since(self) -> float:
        return 0.0 if self._looked is None else self._wall() - self._looked

    def told_when_over(self, subject: str = "the submission") -> str | None:
        """Return the verdict's message if this time is used up, else None."""
        if self.left > 0:
            return None
        return (
            f"{subject} used up its time limit of {self.settings.submission_seconds:g} s, and "
            f"waited another {self.waited:.0f} s for a core"
        )

    def until(self, moment: float) -> float:
        """Return the seconds that must still count before `used` reaches `moment`; 0 after that."""
        now = self.now  # read once: between two readings this process may itself wait for a core
        if self._looked is not None and (self._since > LOOK_EVERY or now >= moment):
            self._look()
            now = self.used
        return max(0.0, moment - now)

    def of(self, seconds: float) -> Deadline:
        """Return a deadline in `seconds`, or sooner if the submission has less time left.

        Raises:
            OutOfTime: the submission has no time left.

        """
        left = self.left
        if left <= 0:
            raise OutOfTime(
                "Not run, because the submission has used up its time limit of "
                f"{self.settings.submission_seconds:g} s."
            )
        return Deadline(self, min(seconds, left))

    def _look(self) -> None:
        """Count the time since the last reading.

        Raises:
            MachineFailure: the machine has stood still for too long.

        """
        assert self._looked is not None
        now, core_times, busy = self._wall(), self._cores(), self._busy()
        ran = waited = 0.0
        for pid, cores in core_times.items():
            before = self._seen.get(pid, Cores(0.0, 0.0))
            ran += max(0.0, cores.ran - before.ran)
            waited += max(0.0, cores.waited - before.waited)
        passed = now - self._looked
        did = busy - self._was_busy + waited
        unseen = passed > UNSEEN and did < passed / 2
        self._looked, self._seen, self._was_busy = now, core_times, busy
        if unseen or any(cores.stopped for cores in core_times.values()):
            self.still += passed
            if self.still > STANDSTILL:
                raise MachineFailure(
                    f"This machine was paused for {self.still:.0f} s during an examination"
                )
            return
        counts = min(passed, max(passed - waited, ran, passed / PATIENCE))
        self.used += counts
        self.waited += passed - counts


class Deadline:
    """A moment of a running budget's time, which can be moved nearer.

    Attributes:
        seconds: its distance when it was set.

    """

    def __init__(self, budget: Budget, seconds: float) -> None:
        self.seconds = seconds
        self._budget = budget
        self._at = budget.now + seconds

    @property
    def left(self) -> float:
        """The least number of seconds until the deadline; 0 after it."""
        return self._budget.until(self._at)

    def shorten(self, seconds: float) -> None:
        """Move the deadline so that it is at most `seconds` away."""
        self._at = min(self._at, self._budget.now + seconds)
