"""Buffers, such as BatchNorm's statistics, which gradients do not keep equal.

Every rank computes them from its own batches. Before the next forward, the first rank broadcasts
its buffers to all ranks. For a different rule (a sum of counters, a mean of statistics) register a
*buffer hook*:

    >>> from course_lib.ddp import DistributedDataParallel
    >>> def largest(group, named_buffers):
    ...     for buffer in named_buffers.values():
    ...         dist.all_reduce(buffer, dist.ReduceOp.MAX, group=group)
    >>> model = DistributedDataParallel(model)
    >>> model.register_buffer_hook(None, largest)

A hook gets all buffers by name, either after each synchronised forward or before it. It may return
futures; backward waits for them at its end.
"""

from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor, nn

from course_lib.collectives import Group
from course_lib.ddp.module_states import broadcast_tensors

BufferHook = Callable[[Any, dict[str, Tensor]], Any]
"""`hook(state, named_buffers)` → None, or a list of futures."""

Wait = Callable[[], object]


class Buffers:
    """The buffers of `module`, except those named in `ignored`, among the ranks of `group`.

    Attributes:
        hook: `(state, hook, after_forward)`, which replaces the broadcast; None to broadcast.

    """

    def __init__(self, module: nn.Module, ignored: Collection[str], group: Group) -> None:
        # Do not keep the buffers themselves: a module may replace a buffer by a different tensor.
        self._owners = list(module.named_modules(remove_duplicate=False))
        self._ignored = ignored
        self._group = group
        self._may_differ = True
        self.hook: tuple[Any, BufferHook, bool] | None = None

    def named(self) -> dict[str, Tensor]:
        """Return name → buffer, as they are now; each one once, without empty ones."""
        found: dict[Tensor, str] = {}
        for prefix, owner in self._owners:
            for name, buffer in owner._buffers.items():
                full_name = f"{prefix}.{name}" if prefix else name
                if buffer is not None and buffer.numel() and full_name not in self._ignored:
                    found.setdefault(buffer, full_name)
        return {name: buffer for buffer, name in found.items()}

    def before_forward(self, source: int, synchronised: bool) -> list[Wait]:
        """Make the buffers equal if the last forward may have made them different.

        Without a hook, all ranks then have the buffers of rank `source` of the group. Returns the
        functions that wait for a hook's futures.
        """
        if self.hook is not None:
            return self._call(after=False) if synchronised else []
        if self._may_differ:
            broadcast_tensors(list(self.named().values()), source, self._group)
        self._may_differ = synchronised
        return []

    def after_forward(self) -> list[Wait]:
        """Call the hook if it runs after forward; return functions that wait for its futures."""
        return self._call(after=True) if self.hook is not None else []

    def _call(self, after: bool) -> list[Wait]:
        assert self.hook is not None
        state, hook, after_forward = self.hook
        if after != after_forward:
            return []
        # .data, as in `broadcast_tensors`: forward may have saved them for a later backward.
        buffers = {name: buffer.data for name, buffer in self.named().items()}
        return [future.wait for future in hook(state, buffers) or []]
