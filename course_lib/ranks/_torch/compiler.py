"""What `torch.compile` must know of ranks."""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar

from torch._C._dynamo import eval_frame

Traced = TypeVar("Traced", bound=object)


def untraced(owner: Traced) -> Traced:
    """Let compiled code call a function, or all methods of a class, and not look inside.

    The compiler does not trace PyTorch's own groups either, because they are in C++.
    """
    skip = eval_frame._FrameAction.SKIP  # the function itself, and all that it calls
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    for function in vars(owner).values() if isinstance(owner, type) else [owner]:
        if isinstance(function, FunctionType):
            eval_frame.set_code_exec_strategy(function.__code__, strategy)
            function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return owner
