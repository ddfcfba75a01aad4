"""A simulated rank's side of the fabric: in the same process, behind the baton."""

from __future__ import annotations

from collections.abc import Callable

from course_lib.ranks.fabric.operation import Operation
from course_lib.ranks.simulated.baton import Baton


class ThreadEndpoint:
    """A rank's side of a fabric in the same process."""

    def __init__(self, baton: Baton, rank: int, spend: Callable[[float], None]) -> None:
        self._baton = baton
        self._rank = rank
        self._spend = spend

    def post(self, operation: Operation) -> None:
        self._baton.count_time(self._spend)
        self._baton.post(operation)
        self._baton.skip_time()

    def wait(self, operation: Operation) -> None:
        self._baton.count_time(self._spend)
        self._baton.wait(operation)
        self._baton.skip_time()

    def in_turn(self) -> None:
        self._baton.count_time(self._spend)
        self._baton.in_turn(self._rank)
        self._baton.skip_time()

    def now(self) -> float:
        self._baton.count_time(self._spend)
        return self._baton.fabric.clock[self._rank]

    def sleep(self, seconds: float) -> None:
        self._baton.count_time(self._spend)
        self._spend(seconds)
        self._baton.in_turn(self._rank)  # who sleeps, in a loop, may wait for another rank
        self._baton.skip_time()

    def release(self, operation: Operation) -> None:
        fabric = self._baton.fabric
        fabric.release(operation, fabric.clock[self._rank])

    def is_done(self, operation: Operation) -> bool:
        self._baton.count_time(self._spend)
        done = self._baton.is_done(operation)
        self._baton.skip_time()
        return done
