"""PyTorch on this thread: the modes that watch its operators, and the running ``backward()``.

PyTorch has no documented way to put a mode below others, or to find out how far a ``backward()``
is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def unseen() -> Any:
    """Return a context manager in which the modes of this thread do not see operators."""
    return torch._C._DisableTorchDispatch()


def without_overrides() -> Any:
    """Return a context manager in which subclasses of tensors behave as plain tensors."""
    return torch._C.DisableTorchFunctionSubclass()


def watch_with(mode: Any) -> None:
    """Put a dispatch mode below this thread's other modes, unless it is already there.

    Below them, it does not matter that the other modes come and go.
    """
    for upper_mode in (mode, *_pop_through(mode)):
        torch._C._push_on_torch_dispatch_stack(upper_mode)


def remove_mode(mode: Any) -> None:
    """Remove a dispatch mode from this thread, if it is there."""
    for upper_mode in _pop_through(mode):
        torch._C._push_on_torch_dispatch_stack(upper_mode)


def _pop_through(mode: Any) -> list[Any]:
    """Remove a mode and all above it, or all modes; return those above, the lowest first."""
    above: list[Any] = []
    while torch._C._len_torch_dispatch_stack():
        top = torch._C._pop_torch_dispatch_stack(None)
        if top is mode:
            break
        above.insert(0, top)
    return above


def backward_id() -> int | None:
    """Return the id of the ``backward()`` in which this thread is, or ``None``.

    A ``backward()`` inside another one, such as that of a reentrant checkpoint, has its own id and
    its own callbacks.
    """
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number


def in_final_callback() -> bool:
    """Return whether ``backward()`` has computed everything and now runs its final callbacks."""
    return backward_id() is not None and torch._C._current_autograd_node() is None


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` on this thread when the running ``backward()`` has computed everything.

    Callbacks run in the order in which they were given. So `callback` runs before callbacks that
    are given later. One of these is the wait of `DistributedDataParallel` for its buckets: it is in
    C++ and cannot be intercepted.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)
