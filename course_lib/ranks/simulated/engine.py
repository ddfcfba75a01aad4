"""`Ranks(K, on="simulated")`: K threads on a fabric with a virtual clock."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Literal

from course_lib.ranks.costs.network import Device, Network
from course_lib.ranks.explain.errors import RanksError
from course_lib.ranks.metered.recorder import Event
from course_lib.ranks.simulated.run import Run

Computation = Literal["declared", "counted", "measured"]
MAX_RANKS = 1024
_one_at_a_time = threading.Lock()


class SimulatedTeam:
    """K simulated ranks. Every call starts from clock zero, with fresh threads and random numbers.

    Args:
        world_size: K.
        network: what messages cost; by default 20 µs and 10 GB/s.
        device: what computation costs.
        computation: how it is found; by default ``"counted"`` if there is a device, else
            ``"declared"``.

    """

    reusable = True

    def __init__(
        self,
        world_size: int,
        network: Network | None = None,
        device: Device | None = None,
        computation: Computation | None = None,
    ) -> None:
        if not isinstance(world_size, int) or not 1 <= world_size <= MAX_RANKS:
            raise ValueError(f"world_size must be 1 to {MAX_RANKS}, got {world_size!r}")
        known = ("declared", "counted", "measured")
        if computation is not None and computation not in known:
            raise ValueError(f"computation must be one of {', '.join(known)}, got {computation!r}")
        if computation == "counted" and device is None:
            raise ValueError('computation="counted" needs device=Device(flops=…)')
        self.world_size = world_size
        self.network = network or Network(latency=20e-6, bandwidth=10e9)
        self.device = device or Device()
        self.computation = computation or ("declared" if device is None else "counted")
        self.events: list[Event] = []
        self.clock: list[float] = [0.0] * world_size

    def healthy(self) -> bool:
        """Return whether a call can be made: always."""
        return True

    def end(self) -> None:
        """Do nothing: no call, no threads."""

    def call(
        self, common: bytes, each: Sequence[bytes], timeout: float | None
    ) -> tuple[list[Any], list[Event]]:
        """Run one call on all ranks; return results and events, in virtual seconds.

        Raises:
            RankError: a rank raised an exception.
            DeadlockError: the ranks wait for one another, or left communication behind.
            MismatchError: the ranks entered different collectives.
            RankTimeout: the call outran `timeout`, in seconds of this computer.

        """
        if not _one_at_a_time.acquire(blocking=False):
            raise RanksError("simulated ranks cannot start simulated ranks, nor two calls at once")
        try:
            run = Run(self.world_size, self.network, self.device, self.computation, common, each)
            try:
                run.go(timeout)
            finally:
                self.events, self.clock = run.fabric.events, run.fabric.clock
                run.fabric.forget()
            return run.results, self.events
        finally:
            _one_at_a_time.release()
