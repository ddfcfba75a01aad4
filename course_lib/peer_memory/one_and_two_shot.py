"""Peer memory: all-reduce between ranks that can read and write each other's memory.

    >>> from course_lib.peer_memory import one_shot
    >>> one_shot(shown, result)  # `shown`: every rank's vector, which this rank can read

Over a network a number must be sent to be added. Processes on one machine do not have to send it.
If a tensor is mapped into all processes, a rank can address another rank's tensor like its own, and
the sum needs only additions (`shared_memory` on the CPU, `symmetric_memory` between GPUs). There
are two algorithms:

    one-shot    barrier; every rank adds up all K tensors by itself          reads (K-1) n bytes
    two-shot    barrier; rank r adds up chunk r and writes it to everyone;   reads and writes
                barrier                                                      2(K-1)/K n bytes

*One-shot* needs only one barrier, so it is for small tensors. *Two-shot* is a reduce-scatter and an
all-gather without a ring: each element is added up on one rank only. Every byte of a tensor is read
once and written once, so it takes t ≥ 2n/B at a memory bandwidth of B bytes/s per rank. It works in
blocks that fit the cache, so a sum is written while it is still in the cache.

The ranks end with the same bits. In one-shot all ranks add in the order of the ranks. In two-shot
one rank adds up each element.

PyTorch has both for GPUs: `torch.ops.symm_mem`, docs.pytorch.org/docs/stable/symmetric_memory.html.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from course_lib.collectives import Group, flat_in_place, place_in
from course_lib.sharding import shard, shard_bounds

_MAX_PLANS = 1024


def one_shot(shown: Sequence[Tensor], result: Tensor) -> None:
    """Write the sum of the `shown` vectors, one of each rank, to `result`, added in their order.

    All vectors have one length and dtype, and `result` is none of the `shown` ones. The ranks must
    pass a barrier after the vectors are written, and one more before they are written again.
    """
    first, *others = shown
    result.copy_(first)
    for other in others:
        result += other


def two_shot(blocks: Sequence[Sequence[Tensor]], barrier: Callable[[], None]) -> None:
    """Replace the vectors of all ranks by their sum, in place. Raises what `barrier` raises.

    `blocks` is the result of `blocks_of`; all ranks must call.
    """
    barrier()
    for mine, *others in blocks:
        for other in others:
            mine += other
        for other in others:
            other.copy_(mine)
    barrier()


def blocks_of(everyones: Sequence[Tensor], rank: int, longest: int) -> list[list[Tensor]]:
    """Return rank's chunk of the K vectors, as views, in blocks of at most `longest` elements.

    A block has K vectors: the part of the rank's own vector, then the parts of the others, in the
    order of `mine_first`.
    """
    first, last = shard_bounds(everyones[0].numel(), len(everyones), rank)
    return [
        mine_first([vector[start : min(start + longest, last)] for vector in everyones], rank)
        for start in range(first, last, longest)
    ]


def mine_first(everyones: Sequence[Tensor], rank: int) -> list[Tensor]:
    """Return the rank's own tensor, and then the tensors of the ranks to its right.

    If all ranks began with the memory of the same rank, they would wait for it.
    """
    return [*everyones[rank:], *everyones[:rank]]


class PeerMemory(ABC):
    """Memory that all ranks of `group` can access, and all-reduces in it.

    All members must construct it, and call its methods in the same order with the same sizes.
    Raises ValueError if this rank is not in the group.
    """

    device_type: ClassVar[str]
    """The device type of the tensors that it reduces."""
    block_bytes: ClassVar[int]
    """Bytes of a block, which two-shot adds and then copies."""
    staging_bytes: ClassVar[int]
    """Bytes of a piece of a private tensor."""
    one_shot_bytes: ClassVar[int]
    """Private tensors of at most this many bytes are reduced in one shot."""

    def __init__(self, group: Group = None) -> None:
        self.group = group
        self.rank, self.world_size = place_in(group)
        self._regions: list[tuple[int, list[Tensor]]] = []  # own address, everyone's bytes
        # (address, elements, dtype) → the blocks to add up: gradients come again in every step.
        self._plans: dict[tuple[int, int, torch.dtype], list[list[Tensor]]] = {}
        self._staging = [self.map(self.staging_bytes) for _ in range(2)]

    @abstractmethod
    def map(self, nbytes: int) -> list[Tensor]:
        """Return at least `nbytes` bytes (uint8) of each rank's memory, mapped on this rank.

        All ranks must call, with the same number, 1 or more.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Wait, on a GPU in its stream, until all ranks have called and can see all writes."""

    def empty(
        self, numel: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> Tensor:
        """Return a vector of `numel` elements, not initialised, that the other ranks can access.

        It is on this memory's device. `device` is ignored; it exists for callers such as
        `DistributedDataParallel(model, allocate=memory.empty)`. The memory exists as long as this
        object. All ranks must call, with the same arguments. Raises ValueError if numel < 0, and as
        `map`.
        """
        if numel < 0:
            raise ValueError(f"numel={numel}: a vector must have 0 elements or more")
        slots = self.map(max(1, numel * dtype.itemsize))
        self._regions.append((slots[self.rank].data_ptr(), slots))
        return slots[self.rank][: numel * dtype.itemsize].view(dtype)

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace everyone's `tensor` (of one shape and dtype) by the sum, in place.

        A tensor inside one made by `empty` is reduced without a copy, which is fastest. It must be
        at the same offset on all ranks, or wrong numbers would be summed. Other tensors are copied
        in and out, in pieces. Raises ValueError for a tensor on a different kind of device,
        TypeError for a sparse one, and what `barrier` raises.
        """
        if tensor.device.type != self.device_type:
            raise ValueError(
                f"{type(self).__name__} is for tensors on {self.device_type}, but this tensor is "
                f"on {tensor.device}"
            )
        with flat_in_place(tensor) as flat:
            if self.world_size == 1 or flat.numel() == 0:
                return
            place = (flat.data_ptr(), flat.numel(), flat.dtype)
            blocks = self._plans.get(place)
            if blocks is None and (everyones := self._everyones(flat)):
                if len(self._plans) >= _MAX_PLANS:
                    self._plans.clear()
                blocks = self._plans[place] = self._blocks(everyones)
            if blocks is None:
                self._staged(flat)
            else:
                two_shot(blocks, self.barrier)

    def _everyones(self, flat: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks at the place of `flat`, or [] if not made by `empty`."""
        start, nbytes = flat.data_ptr(), flat.nbytes
        for address, slots in self._regions:
            offset = start - address
            if offset >= 0 and offset + nbytes <= slots[0].numel():
                return [slot[offset : offset + nbytes].view(flat.dtype) for slot in slots]
        return []

    def _blocks(self, everyones: Sequence[Tensor]) -> list[list[Tensor]]:
        return blocks_of(everyones, self.rank, self.block_bytes // everyones[0].element_size())

    def _staged(self, flat: Tensor) -> None:
        """All-reduce piece by piece through two staging areas, used in turn, also across calls.

        Two are enough: before a rank fills an area again, all ranks pass a barrier of the piece in
        between, so they have read the old content.
        """
        for piece in torch.split(flat, self.staging_bytes // flat.element_size()):
            nbytes = piece.nbytes
            self._staging.reverse()
            shown = [slot[:nbytes].view(flat.dtype) for slot in self._staging[0]]
            shown[self.rank].copy_(piece)
            self.barrier()
            if nbytes <= self.one_shot_bytes:
                one_shot(shown, piece)
            else:  # the second shot reads instead of writing, because the target is private
                mine, *others = mine_first(
                    [shard(slot, self.world_size, self.rank) for slot in shown], self.rank
                )
                for other in others:
                    mine += other
                self.barrier()
                for r, slot in enumerate(shown):
                    shard(piece, self.world_size, r).copy_(shard(slot, self.world_size, r))
