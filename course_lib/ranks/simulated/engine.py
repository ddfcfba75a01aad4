"""Simulated ranks: the engine behind ``on="simulated"``, K threads on a fabric."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

from course_lib.ranks.calls import pack_call
from course_lib.ranks.costs.network import Device, Network
from course_lib.ranks.explain.errors import RanksError
from course_lib.ranks.placement import Placement
from course_lib.ranks.simulated.parcel import pack_to_share, unpack
from course_lib.ranks.simulated.run import Run
from course_lib.ranks.simulated.worlds import Worlds
from course_lib.ranks.trace.trace import Trace

Computation = Literal["declared", "counted", "measured"]
Misuse = Literal["ignore", "warn", "error"]
MAX_RANKS = 1024
_one_at_a_time = threading.Lock()


class Simulated:
    """K simulated ranks. Every call starts from clock zero, with fresh threads and random numbers.

    Args:
        world_size: K.
        network: what messages cost; by default 20 µs and 10 GB/s.
        device: what computation costs.
        computation: how it is found; by default ``"counted"`` if there is a device, else
            ``"declared"``.
        misuse: what happens when a rank never waits for a handle, or touches a buffer before
            ``wait()``: a `MisuseWarning`, or a `MisuseError`.

    """

    def __init__(
        self,
        world_size: int,
        network: Network | None = None,
        device: Device | None = None,
        computation: Computation | None = None,
        misuse: Misuse = "warn",
    ) -> None:
        if not isinstance(world_size, int) or not 1 <= world_size <= MAX_RANKS:
            raise ValueError(f"world_size must be 1 to {MAX_RANKS}, got {world_size!r}")
        known = ("declared", "counted", "measured")
        if misuse not in get_args(Misuse):
            raise ValueError(f'misuse must be "ignore", "warn" or "error", got {misuse!r}')
        if computation is not None and computation not in known:
            raise ValueError(f"computation must be one of {', '.join(known)}, got {computation!r}")
        if computation == "counted" and device is None:
            raise ValueError('computation="counted" needs device=Device(flops=…)')
        self.placement = Placement(
            ("simulated",) * world_size, "fabric", "simulated, virtual clock"
        )
        self.trace = Trace([], world_size)
        self._world_size = world_size
        self._network = network or Network(latency=20e-6, bandwidth=10e9)
        self._device = device or Device()
        self._misuse = misuse
        self._worlds = Worlds(world_size)
        self._computation = computation or ("declared" if device is None else "counted")

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        timeout: float | None,
        check_nan: bool = False,
    ) -> list[Any]:
        """Run one call; see `Ranks.run`. `timeout` is in seconds of this computer."""
        call = pack_call(fn, args, kwargs, self._world_size, pack_to_share)
        self.trace = Trace([], self._world_size)
        if not _one_at_a_time.acquire(blocking=False):
            raise RanksError("simulated ranks cannot start simulated ranks, nor two calls at once")
        try:
            run = Run(
                self._world_size,
                self._network,
                self._device,
                self._computation,
                call,
                self._worlds,
                check_nan=check_nan,
                misuse=self._misuse,
            )
            try:
                run.go(timeout)
            except BaseException:
                # Who made which group may differ between the ranks now.
                self._worlds = Worlds(self._world_size)
                raise
            finally:
                self.trace = Trace(run.fabric.events, self._world_size, network=self._network)
                run.fabric.forget()
            results = [unpack(result) for result in run.results]
            run.forget()
            return results
        finally:
            _one_at_a_time.release()

    def start(self) -> None:
        """Do nothing: threads start with the call that they run."""

    def pids(self) -> list[int]:
        """Return no processes: the ranks are threads of this one."""
        return []

    def close(self) -> None:
        """Do nothing: between calls there are no threads."""
