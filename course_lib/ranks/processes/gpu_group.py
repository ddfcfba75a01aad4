"""Communication of a metered group of GPU ranks: through NCCL, or gloo for what NCCL cannot do.

| | goes by |
|---|---|
| collectives of tensors on a GPU | NCCL |
| ``batch_isend_irecv`` of tensors on a GPU | NCCL, as one launch |
| single messages of tensors on a GPU | gloo, through the host's memory |
| barriers, and tensors on the CPU, also those that hold pickled objects | gloo |

NCCL runs the single messages of two ranks in the order of posting, over both directions together.
It ignores tags. The first message of a pair blocks the host until the other rank posts its own. So
a ring of ``isend`` and ``recv`` that is correct with gloo hangs with NCCL. Through the host's
memory it is slower but correct. A program that must be fast puts its messages into batches.

If NCCL refuses ranks because they share a GPU, gloo does everything. gloo carries collectives of
GPU tensors itself, but in a single message it would pass on only the address.
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
        gloo: PyTorch's process group for gloo.
        nccl: PyTorch's process group for NCCL, or a stand-in; ``None``: gloo does everything.

    """

    def __init__(self, gloo: Any, nccl: Any = None) -> None:
        self.gloo, self.nccl = gloo, nccl

    def carrier(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the group that carries a collective, or a batch of messages, of these tensors."""
        if self.nccl is not None and tensors and all(self.takes(tensor) for tensor in tensors):
            return self.nccl
        if not tensors and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()  # as with NCCL, a barrier waits for what was launched before
        return self.gloo

    def takes(self, tensor: torch.Tensor) -> bool:
        """Return whether NCCL can reach a tensor's memory."""
        return tensor.is_cuda

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> dist.Work:
        """Start a send by gloo. The copy to the host waits for the stream that wrote the tensor."""
        work: dist.Work = self.gloo.send([tensor.cpu() for tensor in tensors], peer, tag)
        return work

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> dist.Work:
        """Start a receive by gloo. A wait for it puts the copy to the GPU on the current stream."""
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
    """Return the inner group, or groups, through which a metered group communicates.

    Args:
        backend: ``"gloo"`` or ``"nccl"``, as the placement of the ranks chose.
        store: the store of this group alone.
        rank: the rank's position in the group.
        size: the number of ranks in the group.
        timeout: the time limit of waits.
        lazy: whether gloo connects when first used.

    """
    gloo = connect_gloo(store, rank, size, timeout, lazy)
    if backend == "nccl":
        apart = dist.PrefixStore("nccl", store)  # type: ignore[attr-defined]
        nccl: Any = dist.ProcessGroupNCCL
        return GpuGroup(gloo, nccl(apart, rank, size, timeout))
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return GpuGroup(gloo)
    return gloo
