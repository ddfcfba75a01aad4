"""gloo as metered groups need it: connected when first used, and without its gaps.

The group of all ranks connects at once. Making any other group takes no time and waits for no other
rank. Two of its members connect when they first exchange something. So a rank that never makes the
group delays only the ranks that need it. That first exchange may wait for the other member's part.

On macOS, every group connects at once (`CONNECTS_LATER`), so making a group waits for its members.

gloo lacks some operations, and some of its works cannot tell when they are over. This module
composes both from the operations that gloo has.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from course_lib.ranks._torch.collective_table import Collective

CONNECTS_LATER = sys.platform != "darwin"
"""Whether gloo can connect a group when it is first used. libuv, its transport on macOS, cannot."""


def connect_gloo(store: Any, rank: int, size: int, timeout: timedelta, lazy: bool = False) -> Any:
    """Return gloo's process group of these members; `lazy`: connect it when first used."""
    gloo: Any = dist.ProcessGroupGloo
    if not (lazy and CONNECTS_LATER):
        return gloo(store, rank, size, timeout)
    # Each group needs its own device: groups that share one and connect when first used hang.
    name = os.environ["GLOO_SOCKET_IFNAME"].split(",")[0]  # the fork server has set it
    device = gloo.create_device(interface=name, lazy_init=True)
    options = gloo._Options()
    options._devices, options._timeout = [device], timeout
    return gloo(store, rank, size, options)


def try_fork(fds: Sequence[int], config: Any) -> None:
    """Do what ends some forks on macOS: draw (Metal), multiply (Accelerate), connect."""
    torch.manual_seed(0)
    torch.rand(64, 64) @ torch.rand(64, 64)
    store = dist.HashStore()  # type: ignore[attr-defined]
    connect_gloo(store, 0, 1, timedelta(seconds=10))


class ComposedWork(dist.Work):
    """A work made of other works: it is over when they are and a last step on this rank is done.

    Args:
        parts: the works.
        finish: the last step, for example cutting a piece out of the received data.
        result: the final value of the future.

    """

    def __init__(
        self, parts: Sequence[dist.Work], finish: Callable[[], object], result: Any
    ) -> None:
        super().__init__()
        self._parts = parts
        self._finish: Callable[[], object] | None = finish
        self._result = result
        self._lock = threading.Lock()

    def _finish_once(self) -> Any:
        with self._lock:
            if self._finish is not None:
                with torch.no_grad():
                    self._finish()
                self._finish = None
        return self._result

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for part in self._parts:
            part.wait(timeout) if timeout else part.wait()
        self._finish_once()
        return True

    def is_completed(self) -> bool:
        if not all(part.is_completed() for part in self._parts):
            return False
        self._finish_once()
        return True

    def get_future(self) -> Any:
        every = torch.futures.collect_all([part.get_future() for part in self._parts])
        return every.then(lambda futures: (futures.value(), self._finish_once())[1])

    def is_success(self) -> bool:
        return all(part.is_success() for part in self._parts)

    def exception(self) -> Any:
        return next(filter(None, (part.exception() for part in self._parts)), None)

    def result(self) -> Any:
        return self._result

    def synchronize(self) -> None:
        self.wait()


def launch(inner: Any, collective: Collective, arguments: tuple[Any, ...], options: Any) -> Any:
    """Launch a collective on gloo or NCCL; return its work."""
    old: Any = getattr(inner, collective.old_method, None)
    method = getattr(inner, collective.method, old)
    if not isinstance(inner, dist.ProcessGroupGloo):
        return method(*arguments, options)
    result = collective.result(arguments)
    puts, gets = collective.operations(arguments, inner.size())[0]
    if collective.kind == "reduce_scatter":
        return _reduce_scatter(inner, gets[0], puts, result, options)
    if collective.kind == "all_to_all":
        return _all_to_all(inner, gets, puts, result)
    tensors = [part for part in tree_leaves(arguments) if isinstance(part, torch.Tensor)]
    alike = collective.in_place or len({tensor.shape for tensor in tensors}) < 2
    if alike and all(map(_in_order, tensors)):
        return method(*arguments, options)
    in_order = [_flat(argument) for argument in arguments]

    def write_back() -> None:
        for target, came in zip(tree_leaves(arguments[0]), tree_leaves(in_order[0]), strict=True):
            if not target.is_contiguous():  # else it has the same memory
                target.copy_(came.view(target.shape))

    return ComposedWork([method(*in_order, options)], write_back, result)


def _in_order(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements are in memory in their order; gloo reads only memory."""
    return tensor.layout is not torch.strided or tensor.is_contiguous()


def _flat(part: Any) -> Any:
    """Return a tensor, or each tensor of lists, as one row in order: its memory, or a copy."""
    if isinstance(part, torch.Tensor):
        return part.detach().contiguous().view(-1)
    return [_flat(inner) for inner in part]


def _reduce_scatter(
    inner: Any, output: torch.Tensor, inputs: Sequence[torch.Tensor], result: Any, options: Any
) -> ComposedWork:
    """All-reduce everything and keep a piece, as gloo does; unlike gloo's own, this work ends."""
    everything = torch.cat([tensor.detach().reshape(-1) for tensor in inputs])
    reduce = dist.AllreduceOptions()
    reduce.reduceOp = options.reduceOp
    piece = everything.view(inner.size(), -1)[inner.rank()]
    return ComposedWork(
        [inner.allreduce([everything], reduce)],
        lambda: output.copy_(piece.view(output.shape)),
        result,
    )


def _all_to_all(
    inner: Any, outputs: list[torch.Tensor], inputs: list[torch.Tensor], result: Any = None
) -> ComposedWork:
    """Exchange all pieces as one tensor, which gloo splits by given sizes."""
    sends = torch.cat([tensor.detach().reshape(-1) for tensor in inputs])
    sizes = [tensor.numel() for tensor in outputs]
    came = torch.empty(sum(sizes), dtype=sends.dtype, device=sends.device)

    def deal() -> None:
        for output, piece in zip(outputs, torch.split(came, sizes), strict=True):
            output.copy_(piece.view(output.shape))

    method = getattr(inner, "all_to_all_single", None) or inner.alltoall_base
    work = method(came, sends, sizes, [tensor.numel() for tensor in inputs], dist.AllToAllOptions())
    return ComposedWork([work], deal, result)
