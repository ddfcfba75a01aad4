"""Classes that `torch.compile` does not trace, as it does not trace PyTorch's own in C++."""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar

from torch._C._dynamo import eval_frame


Owner = TypeVar("Owner", bound=type)


def untraced(owner: Owner) -> Owner:
    """Let compiled functions call the methods of a class; the compiler does not look inside."""
    skip = eval_frame._FrameAction.SKIP  # the method itself, and what it calls
    for method in vars(owner).values():
        if isinstance(method, FunctionType):
            strategy = eval_frame._FrameExecStrategy(skip, skip)
            eval_frame.set_code_exec_strategy(method.__code__, strategy)
            method._torchdynamo_disable = True  # type: ignore[attr-defined]
    return owner
