"""One thread per rank, and one baton: only the rank that holds it runs.

When a rank blocks, it hands the baton to the rank with the smallest clock. So a run is the same
every time. Each rank also has its own random numbers: PyTorch has one generator for all threads,
and its state is exchanged together with the baton.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress

from course_lib.ranks.explain.errors import RanksError
from course_lib.ranks.simulated.fabric import Fabric, Phase
from course_lib.ranks.simulated.fabric_diagnosis import explain_failure
from course_lib.ranks.simulated.operation import Operation
from course_lib.ranks.simulated.personal import PersonalState


class Stopped(BaseException):
    """Unwinds a rank's thread after another rank has failed. User code must not catch it."""


class Baton:
    """Runs the threads of a fabric's ranks, one at a time; to each of them it is the `Endpoint`.

    Attributes:
        error: what went wrong on the fabric; ``None`` while nothing has.
        stopping: whether the ranks are being unwound.

    """

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.error: RanksError | None = None
        self.stopping = False
        self._turn = [threading.Lock() for _ in range(fabric.world_size)]
        for lock in self._turn:
            lock.acquire()
        self.states: Sequence[PersonalState] = ()
        """Per rank; set before `start`."""
        self._abandoned = False

    # Called by the rank that holds the baton --------------------------------------------------

    def begin(self, rank: int) -> None:
        """Wait for the first turn."""
        self._await_turn(rank)

    def wait(self, operation: Operation) -> None:
        """Wait for an operation."""
        self._check()
        if self.fabric.wait(operation):
            self._pass_on(operation.rank)

    def is_done(self, operation: Operation) -> bool:
        """Return whether an operation is over, at the rank's clock."""
        self.in_turn(operation.rank)
        return self.fabric.is_done(operation)

    def post(self, operation: Operation) -> None:
        """Post an operation."""
        self._check()
        self.fabric.post(operation)

    def in_turn(self, rank: int) -> None:
        """Let everything happen that is due before the rank's clock."""
        self._check()
        self.fabric.pause(rank)
        self._pass_on(rank)

    def finish(self, rank: int, raised: bool) -> None:
        """End the rank's part and hand the baton on for the last time."""
        self.fabric.finish(rank, raised)
        self._hand_on()

    def _check(self) -> None:
        if self.stopping:
            raise Stopped

    def _pass_on(self, rank: int) -> None:
        following = self._choose()
        if following == rank and not self.stopping:
            return
        self.states[rank].take()
        if following is not None:
            self._give_turn(following)
        self._await_turn(rank)

    def _hand_on(self) -> None:
        following = self._choose()
        if following is not None:
            self._give_turn(following)

    def _give_turn(self, rank: int) -> None:
        with suppress(RuntimeError):  # after abandon() the lock is already free
            self._turn[rank].release()

    def _choose(self) -> int | None:
        """Return the rank that runs next; after a failure, the next rank to unwind."""
        if not self.stopping:
            following = self.fabric.next_rank()
            if following is not None:
                return following
            blocked = any(phase is Phase.BLOCKED for phase in self.fabric.phase)
            if blocked or self.fabric.failure is not None:
                self.error = explain_failure(self.fabric)
            self.stopping = True
        over = (Phase.FINISHED, Phase.RAISED)
        return next((r for r, phase in enumerate(self.fabric.phase) if phase not in over), None)

    def _await_turn(self, rank: int) -> None:
        self._turn[rank].acquire()
        if self._abandoned:
            raise Stopped
        self.states[rank].give()
        self._check()

    # Called by the thread that is not a rank --------------------------------------------------

    def start(self) -> None:
        """Give the first rank its turn. All threads must have been started."""
        for rank in range(self.fabric.world_size):
            self.fabric.pause(rank)
        self._hand_on()

    def abandon(self) -> None:
        """Unwind all ranks at once, because one of them does not give the baton back."""
        self._abandoned = self.stopping = True
        for rank in range(self.fabric.world_size):
            self._give_turn(rank)
