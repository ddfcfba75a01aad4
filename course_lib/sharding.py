"""Sharding: which examples belong to which rank.

    >>> from course_lib.sharding import shard_bounds
    >>> [shard_bounds(10, world_size=4, rank=rank) for rank in range(4)]
    [(0, 3), (3, 6), (6, 8), (8, 10)]

K ranks share N examples. The shards must be *disjoint*, and together they must *cover* everything.
Otherwise the ranks together do not compute the result of one machine. The shards should also have
nearly the same size, because a step takes as long as its slowest rank.

Two rules are common, and they treat the remainder r = N mod K differently:

- **Contiguous** (`shard_bounds`, `shard`): with N = qK + r, the first r ranks take q + 1 examples
  and the others q. Nothing is lost or repeated, but the sizes of shards may differ by one, so an
  average over ranks must weight them (`gradient_sync`). Use this rule to cut one batch or one long
  tensor.

- **Strided and padded** (`ShardedSampler`, and PyTorch's `DistributedSampler`): rank k takes
  positions k, k + K, k + 2K, … of a shuffled order. Before that, the length of the order is made
  divisible by K, either by *repeating* examples from its start, or, with `drop_last`, by leaving
  out its end. So every rank takes the same number of steps, and no rank waits in a collective for
  one that has already finished its epoch. The price: up to K - 1 examples count twice. That hardly
  matters in training. In an evaluation it makes the reported accuracy slightly wrong, and
  dependent on K.

The order is shuffled with seed + epoch, so it is the same on every rank without a message. A
training loop must call `set_epoch` before each epoch; otherwise every epoch has the same order.

S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from collections.abc import Iterator, Sequence, Sized
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data.distributed import DistributedSampler

Cut = TypeVar("Cut", Tensor, Sequence[Any])


def shard_bounds(length: int, world_size: int, rank: int) -> tuple[int, int]:
    """Return `(start, stop)`: rank's half-open, contiguous part of range(length).

    With length = q * world_size + r, the first r ranks hold q + 1 elements and the others q. Rank 0
    starts at 0, each rank starts where the one before it stops, and the last one stops at `length`.
    A shard may be empty (start == stop), when there are fewer elements than ranks.

    Raises ValueError if length < 0, world_size < 1, or rank is not in 0 … world_size - 1.
    """
    if length < 0 or world_size < 1:
        raise ValueError(
            f"length must be 0 or more and world_size 1 or more, got length={length}, "
            f"world_size={world_size}"
        )
    if not 0 <= rank < world_size:
        raise ValueError(
            f"rank must be 0 to {world_size - 1} with world_size={world_size}, got {rank}"
        )
    quotient, remainder = divmod(length, world_size)
    # min(rank, remainder) of the previous ranks hold one element more.
    start = rank * quotient + min(rank, remainder)
    return start, start + quotient + (rank < remainder)


def shard(data: Cut, world_size: int, rank: int) -> Cut:
    """Return rank's contiguous part of `data`, cut along its first dimension by `shard_bounds`.

    For a tensor of shape (N, …) this is a *view* of shape (about N / world_size, …): it shares
    memory, so writing to it writes to `data`. A list or tuple is sliced, hence copied.

    Raises ValueError as `shard_bounds` does.
    """
    start, stop = shard_bounds(len(data), world_size, rank)
    return data[start:stop]


class ShardedSampler(DistributedSampler[int]):
    """Yield rank's share of the indices of `dataset`, in a new order for every epoch.

    It is a `torch.utils.data.distributed.DistributedSampler`, has its arguments (`num_replicas`,
    `rank`, `shuffle`, `seed`, `drop_last`) and yields exactly the same indices in the same order.
    It is faster, because it converts only its own share to Python numbers, and not all N.

    `num_replicas` and `rank` default to those of the initialised process group. `len(sampler)` is
    the number of indices, the same on each rank: ceil(N / K), or floor(N / K) with `drop_last`.
    `set_epoch` sets the next epoch: the order is shuffled with seed + epoch, equally on all ranks.

    Raises ValueError if rank is not in 0 … num_replicas - 1, or if an argument is missing and there
    is no process group. Iterating raises RuntimeError if the dataset's length has changed
    meanwhile.
    """

    def __init__(self, dataset: Sized, *args: Any, **kwargs: Any) -> None:
        super().__init__(dataset, *args, **kwargs)  # type: ignore[arg-type]
        self._length = len(dataset)

    def __iter__(self) -> Iterator[int]:
        n = len(self.dataset)  # type: ignore[arg-type]
        if n != self._length:
            raise RuntimeError(
                f"the dataset had {self._length} examples when this sampler was made and has {n} "
                "now: make a new sampler, on every rank"
            )
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            # Always on the CPU, because all ranks must draw the same order. The order does not
            # depend on the dtype, and shuffling half the bytes takes half the time.
            dtype = torch.int32 if n < 1 << 31 else torch.int64
            order = torch.randperm(n, generator=generator, device="cpu", dtype=dtype)
        else:
            order = torch.arange(n)
        # Slice first, because converting all n indices to Python numbers is slow.
        yield from order[self.rank : self.total_size : self.num_replicas].tolist()
        # The padded order repeats from its start: position i holds the same index as i mod n. Fewer
        # than K positions are padded, so at most the last one of this rank is.
        last = self.rank + (self.num_samples - 1) * self.num_replicas
        if last >= n > 0:
            yield int(order[last % n])
