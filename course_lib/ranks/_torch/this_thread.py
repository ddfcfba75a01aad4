"""PyTorch on this thread: the modes that watch its operators, and the ``backward()`` that runs.

PyTorch has no documented way to put a mode below others, nor to ask where a ``backward()`` is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def unseen() -> Any:
    """Return what makes, as a context, operators unseen by the modes of this thread."""
    return torch._C._DisableTorchDispatch()


def watch_with(mode: Any) -> None:
    """Put a dispatch mode below those of this thread, if it is not there: theirs come and go."""
    depth = torch._C._len_torch_dispatch_stack()
    if not depth:  # as nearly always
        torch._C._push_on_torch_dispatch_stack(mode)
    if not depth or torch._C._get_dispatch_stack_at(depth - 1) is mode:
        return
    above = []
    while torch._C._len_torch_dispatch_stack():
        top = torch._C._pop_torch_dispatch_stack(None)
        above.append(top)
        if top is mode:
            break
    else:
        torch._C._push_on_torch_dispatch_stack(mode)
    for each in reversed(above):
        torch._C._push_on_torch_dispatch_stack(each)


def remove_mode(mode: Any) -> None:
    """Take a dispatch mode from this thread, if it is there."""
    above = []
    while torch._C._len_torch_dispatch_stack():
        top = torch._C._pop_torch_dispatch_stack(None)
        if top is mode:
            break
        above.append(top)
    for each in reversed(above):
        torch._C._push_on_torch_dispatch_stack(each)


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
