"""PyTorch's profiler on simulated ranks. A process has one, and two at once crash it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


@contextmanager
def one_profiler(
    here: Callable[[], Any],
    replaced: Callable[[Any, str, Callable[[Any], Any]], Any],
) -> Iterator[None]:
    """Refuse a rank's profiler while another rank's runs.

    Args:
        here: returns the rank that this thread is, if any, with its number in `rank`.
        replaced: replaces a function of PyTorch's for a block.

    """
    users: dict[int, int] = {}  # id of the profiler → rank

    def prepare(before: Any) -> Any:
        def prepare_trace(self: Any) -> Any:
            if here() is None:
                return before(self)
            others = [rank for rank in users.values() if rank != here().rank]
            if others:
                raise RuntimeError(
                    f"rank {others[0]} has a profiler running, and simulated ranks are threads of "
                    "one process, which has only one: profile one rank (if dist.get_rank() == 0), "
                    'or use Ranks(…, on="simulated", isolated=True) or on="cpu"'
                )
            users[id(self)] = here().rank
            return before(self)

        return prepare_trace

    def leave(before: Any) -> Any:
        def leave_profiler(self: Any, *raised: Any) -> Any:
            try:
                return before(self, *raised)
            finally:
                users.pop(id(self), None)

        return leave_profiler

    profile = torch.autograd.profiler.profile
    with ExitStack() as stack:
        stack.enter_context(replaced(profile, "_prepare_trace", prepare))
        stack.enter_context(replaced(profile, "__exit__", leave))
        yield
