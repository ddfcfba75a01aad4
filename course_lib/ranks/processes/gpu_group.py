"""A metered group of GPU ranks talks through NCCL, and through gloo where NCCL has no way.

| | goes by |
|---|---|
| collectives of tensors on a GPU | NCCL |
| ``batch_isend_irecv`` of tensors on a GPU | NCCL, as one launch |
| single messages of tensors on a GPU | gloo, through the host's memory |
| barriers, and tensors on the CPU, which objects become | gloo |

NCCL runs the single messages of two ranks in the order in which they were posted, in both
directions together; it ignores tags; and the first message of a pair blocks the host until the
other rank posts its own. A ring of ``isend`` and ``recv`` that is right with gloo hangs. Through
the host's memory it is slower, and right: a program that matters puts its messages into batches.

Ranks that share a GPU where NCCL refuses to have no NCCL: gloo does all. It carries collectives of
GPU tensors itself, but of a single message it would pass on the address.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from course_lib.ranks.processes.gloo import ComposedWork, connect_gloo


class GpuGroup:
    """The inner groups of one rank.

    Args:
        gloo: PyTorch's process group.
        nccl: PyTorch's, or what behaves so; ``None``: gloo does all.

    """

    def __init__(self, gloo: Any, nccl: Any = None) -> None:
        self.gloo, self.nccl = gloo, nccl

    def carrier(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the group that carries a collective, or a batch of messages, of these tensors."""
        if self.nccl is not None and tensors and all(self.takes(tensor) for tensor in tensors):
            return self.nccl
        if not tensors and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()  # a barrier comes after what was launched, as NCCL's does
        return self.gloo

    def takes(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies where NCCL can reach it."""
        return tensor.is_cuda

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> dist.Work:
        """Start a send by gloo. Copying to the host waits for the stream that wrote the tensor."""
        work: dist.Work = self.gloo.send([tensor.cpu() for tensor in tensors], peer, tag)
        return work

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> dist.Work:
        """Start a receive by gloo; who waits for it puts the copy to the GPU on its stream."""
        if not any(tensor.is_cuda for tensor in tensors):
            work: dist.Work = self.gloo.recv(tensors, peer, tag)
            return work
        staged = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]

        def copy() -> None:
            for tensor, came in zip(tensors, staged, strict=True):
                tensor.copy_(came, non_blocking=True)

        return ComposedWork([self.gloo.recv(staged, peer, tag)], copy, list(tensors))


def connect(
    backend: str, store: Any, rank: int, size: int, timeout: timedelta, lazy: bool = False
) -> Any:
    """Return what a metered group talks through.

    Args:
        backend: ``"gloo"`` or ``"nccl"``, as the placement of the ranks chose.
        store: of this group alone.
        rank: in the group.
        size: of the group.
        timeout: of waits.
        lazy: whether gloo connects when first used, where it can.

    """
    gloo = connect_gloo(store, rank, size, timeout, lazy)
    if backend == "nccl":
        apart = dist.PrefixStore("nccl", store)  # type: ignore[attr-defined]
        nccl: Any = dist.ProcessGroupNCCL
        return GpuGroup(gloo, nccl(apart, rank, size, timeout))
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return GpuGroup(gloo)
    return gloo
