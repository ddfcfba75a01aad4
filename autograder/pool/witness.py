"""Was it the machine? What happens outside a sandbox while a submission is examined in it.

A limit of time says something about a program only where the machine ran; the end of a process only
where the machine did not end it. What this cannot see: a machine that is merely slow.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from pathlib import Path

from autograder.examination.check import TIME
from autograder.examination.verdict import Verdict
from course_lib.ranks.explain.failure import exit_reason

STILL = 3.0
"""Seconds without a beat after which limits of time are not believed."""
_BEAT = 0.1


class InfrastructureFailure(RuntimeError):
    """The machine failed a submission: nobody loses points for that."""


class Witness:
    """Watches from ``with`` to its end.

    Attributes:
        still: the longest time, in seconds, in which this process was not run. A machine that was
            asleep, stopped, or had no memory left to do anything shows here.

    """

    def __init__(self) -> None:
        self.still = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Witness:
        self._oom_before = _oom_kills()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._oom_after = _oom_kills()

    def _beat(self) -> None:
        last = _now()
        while not self._over.wait(_BEAT):
            now = _now()
            self.still = max(self.still, now - last - _BEAT)
            last = now

    def testify(self, verdict: Verdict) -> None:
        """Let pass a verdict that the machine had no part in.

        Raises:
            InfrastructureFailure: it may have had.

        """
        if self.still > STILL and any(limit.startswith(TIME) for limit in verdict.limits):
            raise InfrastructureFailure(
                f"a limit of time was met, but this machine stood still for {self.still:.0f} s"
            )
        killed = exit_reason(-signal.SIGKILL)
        reasons = (case["reason"] for check in verdict.checks for case in check.cases)
        if self._oom_after > self._oom_before and any(killed in reason for reason in reasons):
            raise InfrastructureFailure(
                "a process was killed while the machine was out of memory, and not by its own limit"
            )


def _now() -> float:
    """Seconds, those of a machine asleep included where the system counts them."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _oom_kills() -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
