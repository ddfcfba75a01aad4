"""Python's own clocks on simulated ranks: ``time.sleep`` and ``time.perf_counter`` are virtual.

A straggler that sleeps is visible in the trace, and a rank measures the times that the trace shows.
CPU time (``time.process_time``, ``time.thread_time``) remains the real CPU time.

An imported file that copied a clock before the call (``from time import sleep``) keeps the real
clock. Functions that are sent from a notebook find the virtual one. The standard library gets the
real clocks, too, because pools and event loops wait for the system, which uses real time.

A virtual clock stands still while Python runs. So a loop until a time has come would never end.
After many looks at a clock that stands still, each further look lets a little time pass.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

from course_lib.ranks._torch.thread_worlds import current, replaced

_WAITING = 100_000
"""Looks at an unchanged clock, about a tenth of a second, after which a rank waits for the time."""
_TICK = 1e-4
"""Seconds of virtual time that pass with each further look."""


def _waits_itself(caller: FrameType) -> bool:
    """Return whether the caller belongs to the standard library, which waits in real time."""
    return caller.f_globals.get("__name__", "").partition(".")[0] in sys.stdlib_module_names


@contextmanager
def virtual_time(
    clock: Sequence[float], sleep_on: Callable[[int, float], object]
) -> Iterator[None]:
    """Make the clocks of the module `time` virtual on the threads that are ranks.

    Args:
        clock: per rank, its time in seconds.
        sleep_on: lets a rank sleep, for a number of seconds.

    """
    started = time.time()
    looks: dict[int, tuple[float, int]] = {}

    def look(rank: int) -> float:
        now = clock[rank]
        before, count = looks.get(rank, (now, 0))
        count = count + 1 if now == before else 1
        if count > _WAITING:
            sleep_on(rank, _TICK)
            now = clock[rank]
        looks[rank] = now, count
        return now

    def instead(real: Callable[..., Any], of: Callable[[float], Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def read() -> Any:
            context = None if _waits_itself(sys._getframe(1)) else current()
            return real() if context is None else of(look(context.rank))

        return read

    real_sleep = time.sleep

    @functools.wraps(real_sleep)
    def sleep(seconds: float, /) -> None:
        context = None if _waits_itself(sys._getframe(1)) else current()
        if context is None:
            real_sleep(seconds)
        elif seconds < 0:
            raise ValueError("sleep length must be non-negative")
        else:
            sleep_on(context.rank, seconds)

    clocks: dict[str, Callable[[float], Any]] = {
        "perf_counter": float,
        "monotonic": float,
        "time": lambda now: started + now,
        "perf_counter_ns": lambda now: round(now * 1e9),
        "monotonic_ns": lambda now: round(now * 1e9),
        "time_ns": lambda now: round((started + now) * 1e9),
    }
    with ExitStack() as stack:
        for name, of in clocks.items():
            stack.enter_context(replaced(time, name, instead(getattr(time, name), of)))
        stack.enter_context(replaced(time, "sleep", sleep))
        yield
