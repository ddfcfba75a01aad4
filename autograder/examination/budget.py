"""The time that one submission may take: per cell, per case, and in all.

The rule for every limit: **wall-clock time counts, except while the submission waits for a core.**
A submission that computes, sleeps or is stuck uses up its time. One that waits for a core, because
the machine is busy, does not. So the same code gets the same verdict on a machine of which it has
only a tenth.

Nobody can cheat by waiting. The time that all processes of the submission run on cores always
counts, so filling the queue oneself gains nothing. A tenth of the wall-clock time always counts
too, so nothing lasts longer than ten times its limit. If a submission gets that far, the verdict's
notes have its numbers.

Time in which the machine stood still does not count at all: a process of the submission was stopped
from outside, or this process was not run. After `STANDSTILL` seconds of it the examination is given
up as the machine's failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autograder.sandbox.cores import Cores
from autograder.sandbox.place import MachineFailure
from autograder.settings import Settings
from course_lib.checking.limits import CASE_SECONDS
from course_lib.ranks.explain.errors import RanksError

PATIENCE = 10
"""A second that counts lasts at most this many seconds of wall-clock time."""
LOOK_EVERY = 0.2
"""Seconds between two looks at values that can only be seen from outside."""
UNSEEN = 3.0
"""A gap of so many seconds between looks, without computing or queuing, is a standstill."""
STANDSTILL = 60.0
"""Seconds that the machine may stand still in one examination."""


class OutOfTime(RanksError):
    """The submission, or one check of it, has used up its time; nothing more is run."""


@dataclass(frozen=True)
class Limits:
    """Seconds that count.

    Attributes:
        cell: of one cell of the notebook.
        case: of one case whose check does not ask for others.
        submission: of everything that student code does.

    """

    cell: float = Settings.cell_seconds
    case: float = CASE_SECONDS
    submission: float = Settings.submission_seconds


class Budget:
    """The time that a submission has left. The clock runs only while student code runs.

    It stops before processes are ended: Linux knows how long one waited only while it exists.

    Args:
        limits: the limits.
        cores: returns the core times of the submission's processes so far, and of those of ours
            that they wait for, by their pids.
        wall: the wall clock.
        busy: seconds that this process has computed so far.

    Attributes:
        limits: the limits.
        used: seconds that have counted so far, at the last look.
        waited: wall-clock seconds that did not count because the submission waited for a core.
        still: wall-clock seconds that did not count because the machine stood still.

    """

    def __init__(
        self,
        limits: Limits,
        cores: Callable[[], Mapping[int, Cores]] = dict,
        wall: Callable[[], float] = time.monotonic,
        busy: Callable[[], float] = time.process_time,
    ) -> None:
        self.limits = limits
        self.used = self.waited = self.still = 0.0
        self._cores, self._wall, self._busy = cores, wall, busy
        self._looked: float | None = None
        self._was_busy = 0.0
        self._seen: Mapping[int, Cores] = {}

    def __enter__(self) -> Budget:
        """Let the clock run."""
        self._looked, self._seen, self._was_busy = self._wall(), self._cores(), self._busy()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self._look()
        except MachineFailure:
            if kind is None:  # else the exception already says more
                raise
        finally:
            self._looked = None

    @property
    def left(self) -> float:
        """Seconds that the submission still has."""
        return self.until(self.limits.submission)

    @property
    def now(self) -> float:
        """`used` if all time since the last look counts."""
        return self.used + self._since

    @property
    def _since(self) -> float:
        return 0.0 if self._looked is None else self._wall() - self._looked

    def told_when_over(self) -> str | None:
        """Return the verdict's words on a submission whose time is used up."""
        if self.left > 0:
            return None
        words = f"the submission used up its time limit of {self.limits.submission:g} s"
        if self.waited < 1:
            return words
        took = self.used + self.waited
        words += f"; by the clock it took {took:.0f} s, because it had to wait for a core"
        if self.waited < self.used:
            return words
        return f"{words}. This machine was busy: grade this submission again, with fewer --jobs"

    def until(self, moment: float) -> float:
        """Return the seconds that must still count before `used` is `moment`; 0 once it is."""
        now = self.now  # read once: between two readings this process may itself wait for a core
        if self._looked is not None and (self._since > LOOK_EVERY or now >= moment):
            self._look()
            now = self.used
        return max(0.0, moment - now)

    def of(self, seconds: float) -> Deadline:
        """Return the deadline for something that has a limit of `seconds` of its own.

        Raises:
            OutOfTime: the submission has no time left.

        """
        left = self.left
        if left <= 0:
            raise OutOfTime(
                "Not run, because the submission has used up its time limit of "
                f"{self.limits.submission:g} s."
            )
        return Deadline(self, min(seconds, left))

    def _look(self) -> None:
        """Count the time since the last look.

        Raises:
            MachineFailure: the machine has stood still for too long.

        """
        assert self._looked is not None
        now, seen, busy = self._wall(), self._cores(), self._busy()
        ran = waited = 0.0
        for pid, cores in seen.items():
            before = self._seen.get(pid, Cores(0.0, 0.0))
            ran += max(0.0, cores.ran - before.ran)
            waited += max(0.0, cores.waited - before.waited)
        passed = now - self._looked
        did = busy - self._was_busy + waited
        unseen = passed > UNSEEN and did < passed / 2
        self._looked, self._seen, self._was_busy = now, seen, busy
        if unseen or any(cores.stopped for cores in seen.values()):
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
    """A moment of a running budget's time, which may come nearer.

    Attributes:
        seconds: its distance at first.

    """

    def __init__(self, budget: Budget, seconds: float) -> None:
        self.seconds = seconds
        self._budget = budget
        self._at = budget.now + seconds

    @property
    def left(self) -> float:
        """Seconds until then, at least; 0 once it has passed."""
        return self._budget.until(self._at)

    def shorten(self, seconds: float) -> None:
        """Make it come in `seconds` at the latest."""
        self._at = min(self._at, self._budget.now + seconds)
