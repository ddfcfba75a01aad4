"""The cost of computation on a simulated rank: declared, or counted.

- declared: only calls of `compute` cost time.
- counted, with a `Device`: every operator, too, costs the time of its floating-point operations and
  of its memory traffic on the device. Backward counts layer by layer, so a gradient bucket is sent
  when its last gradient is ready.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from course_lib.ranks.costs.network import Device


class _Local(threading.local):
    compute: Callable[[float], None] | None = None
    clock: Callable[[], float] | None = None
    ask: Callable[[Any], Any] | None = None


_local = _Local()


def compute(seconds: float) -> None:
    """Declare that this rank computes for `seconds`.

    On a simulated rank the virtual clock advances, without real waiting. Elsewhere the rank sleeps,
    so that the same function shows the same timeline.

    Raises:
        ValueError: the time is negative.

    """
    if not 0 <= seconds < math.inf:
        raise ValueError(f"compute needs seconds of 0 or more, got {seconds=}")
    (_local.compute or time.sleep)(seconds)


def clock() -> float:
    """Return this rank's clock in seconds: virtual on a simulated rank, else the real one."""
    return time.perf_counter() if _local.clock is None else _local.clock()


def is_simulated() -> bool:
    """Return whether this is a simulated rank, whose clock is virtual."""
    return _local.clock is not None


def examiner() -> Callable[[Any], Any] | None:
    """Return the function that asks the examiner; None if this rank has none.

    The examiner computes the answer, and lets its virtual time pass on this rank.
    """
    return _local.ask


def enter_rank(
    spend: Callable[[float], None],
    now: Callable[[], float],
    ask: Callable[[Any], Any] | None = None,
) -> None:
    """Make this thread a simulated rank: `compute` then calls `spend`, and `clock` calls `now`."""
    _local.compute, _local.clock, _local.ask = spend, now, ask


class CountedOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, every operator of this thread costs the time that it takes on the device."""

    def __init__(self, device: Device, spend: Callable[[float], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._spend = spend

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace != "aten":
            return out
        packet = func._overloadpacket
        flops = 0
        if packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=out)
        traffic = 0
        if self._device.memory_bandwidth < math.inf and not func.is_view:
            traffic = sum(
                leaf.numel() * leaf.element_size()
                for leaf in tree_leaves((args, kwargs, out))
                if isinstance(leaf, torch.Tensor)
            )
        if flops or traffic:
            self._spend(self._device.time(flops, traffic))
        return out
