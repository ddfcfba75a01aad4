"""Dispatch modes of one thread: who watches the operators that a rank runs.

The stack of modes is PyTorch's own, without a documented way to put one below the others.
"""

from __future__ import annotations

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
