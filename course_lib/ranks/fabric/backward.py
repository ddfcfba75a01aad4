"""Where a thread is in ``backward()``: what PyTorch knows of it and does not document."""

from __future__ import annotations

from collections.abc import Callable

import torch


def backward_id() -> int | None:
    """Return which ``backward()`` this thread is inside, or ``None``.

    One that runs inside another, as that of a reentrant checkpoint, has its own callbacks.
    """
    found = torch._C._current_graph_task_id()
    return None if found == -1 else found


def in_final_callback() -> bool:
    """Return whether ``backward()`` has computed everything, and runs what was to follow it."""
    return backward_id() is not None and torch._C._current_autograd_node() is None


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` on this thread when the running ``backward()`` has computed everything.

    Callbacks run in the order in which they were given, so before those of an operation that is
    launched later: `DistributedDataParallel` waits for its buckets in such a callback, in C++,
    where a wait cannot be intercepted.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)
