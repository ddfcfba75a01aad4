"""Shared memory: all-reduce between ranks of one machine, without messages.

Over a network a number must be sent to be added. Processes of one machine can map the same memory
instead (`shared_pages`): each sees the others' tensors at an address of its own, and the sum is
plain additions. On GPUs this is symmetric memory over NVLink (`symmetric_memory`).

    barrier             everyone's numbers are there
    rank r:             chunk r of mine += chunk r of each other rank      reads  n bytes
                        chunk r of each other rank = chunk r of mine       writes n bytes
    barrier             everyone's sum is there

The *two-shot* algorithm is a reduce-scatter and an all-gather without a ring. In all, every byte is
read once and written once, so it takes t ≥ 2n/B at a memory bandwidth of B bytes/s. In blocks that
fit the cache, the sum is written while it is still there. Each chunk is added up on one rank, so
the ranks end with the same bits.

`SharedMemory.empty` makes a tensor that the others can see: gradients that live in it are reduced
where they are. Other tensors are copied in and out, in pieces.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from course_lib.point_to_point import Group, flat_in_place, place_in
from course_lib.sharding import shard, shard_bounds
from course_lib.shared_pages import SpinBarrier, map_for_all

BLOCK_BYTES = 512 << 10
"""Bytes that are added and then copied in one go: they must stay in the cache in between."""
STAGING_BYTES = 2 << 20
"""Bytes of a piece of a private tensor."""
_MAX_PLANS = 1024


class SharedMemory:
    """Memory that the ranks of `group`, all on one machine, share.

    All members must construct it, and call its methods in the same order with the same sizes.

    Args:
        group: the process group; used to agree on names, not for the data. None for all ranks.
        timeout: seconds after which a rank that does not come to a barrier is given up.

    Attributes:
        barrier: `barrier()` returns when all ranks have called it; see `SpinBarrier`.

    Raises:
        OSError: there is not enough memory, or the ranks are not on one machine.
        ValueError: this rank is not in the group.

    """

    def __init__(self, group: Group = None, timeout: float = 300.0) -> None:
        self.group = group
        self.rank, self.world_size = place_in(group)
        self._regions: list[tuple[int, list[Tensor]]] = []  # own address, everyone's bytes
        # (address, elements, dtype) → the blocks to add up: gradients come again in every step.
        self._plans: dict[tuple[int, int, torch.dtype], list[list[Tensor]]] = {}
        self.barrier = SpinBarrier(group, timeout)
        self._staging = [map_for_all(STAGING_BYTES, group) for _ in range(2)]

    def empty(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a vector of `numel` elements, not initialised, that the other ranks can see.

        The memory stays until this object goes. All ranks must call, with the same arguments.
        """
        slots = map_for_all(max(1, numel * dtype.itemsize), self.group)
        self._regions.append((slots[self.rank].data_ptr(), slots))
        return slots[self.rank][: numel * dtype.itemsize].view(dtype)

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace everyone's `tensor` (on the CPU, one shape and dtype) by the sum, in place.

        Fastest for tensors within one made by `empty`, at the same place on all ranks. Raises
        TimeoutError, naming the rank, if one does not come, and ValueError for another device.
        """
        if tensor.device.type != "cpu":
            raise ValueError(f"shared memory is the CPU's, and this tensor is on {tensor.device}")
        with flat_in_place(tensor) as flat:
            if self.world_size == 1 or flat.numel() == 0:
                return
            place = (flat.data_ptr(), flat.numel(), flat.dtype)
            blocks = self._plans.get(place)
            if blocks is None and (slots := self._everyone_s(flat)):
                if len(self._plans) >= _MAX_PLANS:
                    self._plans.clear()
                blocks = self._plans[place] = self._blocks(slots)
            if blocks is None:
                self._staged(flat)
            else:
                self._two_shot(blocks)

    def _everyone_s(self, flat: Tensor) -> list[Tensor]:
        """Return what lies at the place of `flat` on all ranks, if that is shared memory."""
        start, nbytes = flat.data_ptr(), flat.numel() * flat.element_size()
        for address, slots in self._regions:
            offset = start - address
            if offset >= 0 and offset + nbytes <= slots[0].numel():
                return [slot[offset : offset + nbytes].view(flat.dtype) for slot in slots]
        return []

    def _blocks(self, slots: list[Tensor]) -> list[list[Tensor]]:
        """Return this rank's chunk, block by block: of each, its own and then the others' part."""
        first, last = shard_bounds(slots[0].numel(), self.world_size, self.rank)
        step = BLOCK_BYTES // slots[0].element_size()
        return [
            list(self._mine_first([slot[start : min(start + step, last)] for slot in slots]))
            for start in range(first, last, step)
        ]

    def _two_shot(self, blocks: list[list[Tensor]]) -> None:
        self.barrier()
        for mine, *others in blocks:
            for other in others:
                mine += other
            for other in others:
                other.copy_(mine)
        self.barrier()

    def _staged(self, flat: Tensor) -> None:
        """All-reduce piece by piece through two staging areas, used in turn, also across calls.

        Two are enough: when a rank fills one again, all others have been at the barrier of the
        piece in between, so they have read what was in it.
        """
        step = STAGING_BYTES // flat.element_size()
        for piece in torch.split(flat, step):
            self._staging.reverse()
            nbytes = piece.numel() * piece.element_size()
            slots = [slot[:nbytes].view(flat.dtype) for slot in self._staging[0]]
            slots[self.rank].copy_(piece)
            self.barrier()
            mine, *others = self._mine_first(
                [shard(slot, self.world_size, self.rank) for slot in slots]
            )
            for other in others:
                mine += other
            self.barrier()
            for r, slot in enumerate(slots):
                shard(piece, self.world_size, r).copy_(shard(slot, self.world_size, r))

    def _mine_first(self, slots: list[Tensor]) -> Iterator[Tensor]:
        """Yield this rank's, then the others from its right-hand neighbour on."""
        return (slots[(self.rank + i) % self.world_size] for i in range(self.world_size))
