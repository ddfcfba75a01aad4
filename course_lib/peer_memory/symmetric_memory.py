"""Symmetric memory: peer memory on GPUs of one machine, over NVLink or PCIe.

    >>> from course_lib.peer_memory import SymmetricMemory
    >>> memory = SymmetricMemory()  # once, on all ranks, a GPU each
    >>> memory.all_reduce(gradient)  # in place; every rank then holds the sum

A GPU can read and write the memory of another GPU if both have agreed on it. PyTorch's symmetric
memory allocates the same amount on every rank, exchanges the addresses (a *rendezvous*), and offers
a barrier that the GPUs run themselves. The host launches a few kernels and does not wait.

NCCL needs a kernel with many phases, or one message per neighbour, for a tensor of any size.
One-shot needs one barrier and K additions, so it is faster for tensors below about 100 KB.

The sums here are PyTorch's own additions, one kernel each, so that they can be read. PyTorch does
the same in a single kernel: `torch.ops.symm_mem.one_shot_all_reduce` and
`torch.ops.symm_mem.two_shot_all_reduce_`.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.collectives import Group, place_in
from course_lib.peer_memory.one_and_two_shot import PeerMemory


class SymmetricMemory(PeerMemory):
    """Memory of GPUs of one machine that the ranks of `group`, one GPU each, share.

    All members must construct it, and call its methods in the same order with the same sizes. Work
    launched on the current stream runs in order with the all-reduces.

    Args:
        group: the process group; None for all ranks.
        device: this rank's GPU; None: the current one.

    Raises:
        ImportError: this PyTorch has no symmetric memory.
        RuntimeError: PyTorch cannot share memory between these GPUs.
        ValueError: this rank is not in the group.

    """

    device_type = "cuda"
    block_bytes = 1 << 40  # the whole chunk: more kernels would cost more than caches gain
    staging_bytes = 32 << 20
    one_shot_bytes = 256 << 10

    def __init__(self, group: Group = None, device: torch.device | str | None = None) -> None:
        place_in(group)
        self.device = torch.device("cuda" if device is None else device)
        self._handles: list[Any] = []
        super().__init__(group)

    def map(self, nbytes: int) -> list[Tensor]:
        """Return `nbytes` bytes (uint8), not initialised, of each rank's GPU."""
        # Imported here, because it is not in every PyTorch, and is an alpha feature.
        import torch.distributed._symmetric_memory as symm_mem

        mine = symm_mem.empty(nbytes, dtype=torch.uint8, device=self.device)
        group = dist.group.WORLD if self.group is None else self.group
        assert group is not None  # place_in has refused that
        handle = symm_mem.rendezvous(mine, group)
        self._handles.append(handle)  # keeps the others' addresses valid
        return [
            mine if r == self.rank else handle.get_buffer(r, (nbytes,), torch.uint8)
            for r in range(self.world_size)
        ]

    def barrier(self) -> None:
        """Make the current stream wait until the streams of all ranks have arrived here."""
        self._handles[0].barrier(channel=0)
