"""All-to-all: every rank has a different chunk for every rank.

    >>> from course_lib.collectives import all_to_all
    >>> received = all_to_all(gradient)  # row s: what rank s had for this rank

A broadcast copies, an all-reduce adds, an all-to-all only re-sorts. If the ranks' tensors are the
rows of a matrix of chunks, an all-to-all transposes it. Each rank keeps one of its K chunks and
sends the K - 1 others, n/K bytes each:

    time  (K-1) (α + n/(Kβ))         bytes sent by one rank  (K-1)/K n

with n the bytes of the tensor, latency α (s), bandwidth β (bytes/s). This is half the time of a
ring all-reduce. Nothing is added on the way, so a compressed piece arrives as it was sent. So an
all-to-all is used to reduce compressed gradients. It is also used in mixtures of experts, in which
every rank has tokens for every expert.

In step s rank r sends to rank r + s and receives from rank r - s. So the link of every rank is busy
with one message in and one out. If all ranks began with rank 0, they would queue for its link.

R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of Collective Communication Operations in
MPICH", 2005.
"""

from torch import Tensor

from course_lib.collectives.point_to_point import Group, exchange, flat_in_place, place_in
from course_lib.sharding import shard


def all_to_all(tensor: Tensor, group: Group = None) -> Tensor:
    """Return a matrix whose row s is chunk r of rank s's `tensor`, with r this rank.

    Its shape is (K, length of chunk r). The tensors have one shape and dtype, and are not changed.
    Chunk r is elements `shard_bounds(numel, K, r)` of the flattened tensor. The sum of the rows is
    the result of `reduce_scatter`. Time (K-1) (α + n/(Kβ)). Raises ValueError if this rank is not
    in `group`, and TypeError for a sparse tensor.
    """
    rank, world_size = place_in(group)
    with flat_in_place(tensor) as flat:
        own_chunk = shard(flat, world_size, rank)
        received = flat.new_empty(world_size, own_chunk.numel())
        received[rank] = own_chunk
        for step in range(1, world_size):
            to, source = (rank + step) % world_size, (rank - step) % world_size
            exchange(shard(flat, world_size, to), to, received[source], source, group)
    return received
