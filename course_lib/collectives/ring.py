"""The ring: reduce-scatter and all-gather, which together are an all-reduce.

    >>> from course_lib.collectives import all_gather, reduce_scatter
    >>> chunk = reduce_scatter(gradient)  # this rank's chunk of the sum
    >>> all_gather(gradient)  # in place; every rank then holds all chunks

K ranks form a ring. Each rank sends to its right neighbour and receives from its left one, at the
same time. The tensor, n bytes, is cut into K chunks; chunk r belongs to rank r.

**Reduce-scatter.** Chunk c starts at rank c + 1 and travels once around the ring, to rank c; every
rank that it visits adds its own part. In each of K - 1 steps every rank sends one chunk and
receives a different one, so all links work all the time. At the end rank r holds chunk r of the
sum.

**All-gather.** Each finished chunk travels around the ring once more, and is now copied.

    time of each half  (K-1) (α + n/(Kβ))         bytes sent by one rank  (K-1)/K n

with latency α (s) and bandwidth β (bytes/s). In both halves together a rank sends 2(K-1)/K n bytes,
which is less than 2n for any number of ranks. No all-reduce can send fewer bytes: this is why rings
are used for the gradients of large models. The price is the latency of 2(K-1) messages one after
the other, which makes rings slow for small tensors and large K.

Every chunk is added up once, on one path, and then copied, so all ranks end with the same bits.

P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
J. Parallel Distrib. Comput. 2009; A. Gibiansky, "Bringing HPC Techniques to Deep Learning", 2017.
"""

from torch import Tensor

from course_lib.collectives.point_to_point import Group, exchange, flat_in_place, place_in
from course_lib.sharding import shard, shard_bounds


def reduce_scatter(tensor: Tensor, group: Group = None) -> Tensor:
    """Return this rank's chunk, a vector, of the sum over all ranks' `tensor`.

    The tensors have one shape and dtype. Chunk r is elements `shard_bounds(numel, K, r)` of the
    flattened tensor. `tensor` is overwritten: its chunk r becomes the sum, and the rest holds
    partial sums. The result is a view of `tensor` if this is contiguous, else a copy. Time
    (K-1) (α + n/(Kβ)). Raises ValueError if this rank is not in `group`, and TypeError for a sparse
    tensor.
    """
    rank, world_size = place_in(group)
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    with flat_in_place(tensor) as flat:
        longest = shard_bounds(flat.numel(), world_size, 0)[1]
        buffer = flat.new_empty(longest if world_size > 1 else 0)
        for step in range(world_size - 1):
            outgoing = shard(flat, world_size, (rank - step - 1) % world_size)
            partial_sum = shard(flat, world_size, (rank - step - 2) % world_size)
            incoming = buffer[: partial_sum.numel()]
            exchange(outgoing, right, incoming, left, group)
            partial_sum += incoming
    return shard(flat, world_size, rank)


def all_gather(tensor: Tensor, group: Group = None) -> None:
    """Fill everyone's `tensor`, in place, with chunk r from rank r, for each rank r.

    Chunk r is elements `shard_bounds(numel, K, r)` of the flattened tensor, which has the same
    shape and dtype on all ranks. Time (K-1) (α + n/(Kβ)). Raises as `reduce_scatter`.
    """
    rank, world_size = place_in(group)
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    with flat_in_place(tensor) as flat:
        for step in range(world_size - 1):
            outgoing = shard(flat, world_size, (rank - step) % world_size)
            incoming = shard(flat, world_size, (rank - step - 1) % world_size)
            exchange(outgoing, right, incoming, left, group)


def ring_reduce_scatter(tensor: Tensor, group: Group = None) -> Tensor:
    """Return this rank's chunk of the sum in new memory; `tensor` stays as it is."""
    return reduce_scatter(tensor.clone(), group).clone()


def ring_all_gather(chunk: Tensor, length: int, group: Group = None) -> Tensor:
    """Return the vector of `length` numbers whose chunk r is rank r's `chunk`, in new memory."""
    rank, world_size = place_in(group)
    vector = chunk.new_empty(length)
    shard(vector, world_size, rank).copy_(chunk)
    all_gather(vector, group)
    return vector


def ring_all_reduce(tensor: Tensor, group: Group = None) -> None:
    """Replace everyone's `tensor` (one shape and dtype) by the sum over all ranks, in place.

    It runs `reduce_scatter`, then `all_gather`: 2(K-1) (α + n/(Kβ)) seconds. With c_r the bytes of
    chunk r, rank r sends 2n - c_r - c_{r+1} bytes, which is 2(K-1)/K n if K divides the length.
    Raises as `reduce_scatter`.
    """
    with flat_in_place(tensor) as flat:
        reduce_scatter(flat, group)
        all_gather(flat, group)
