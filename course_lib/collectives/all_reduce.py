"""All-reduce in four ways, and how they and the ring (`ring`) compare.

    >>> from course_lib.collectives import halving_doubling_all_reduce
    >>> halving_doubling_all_reduce(gradient)  # in place; every rank then holds the sum

An all-reduce replaces the tensor of every rank by the sum over all ranks. In data-parallel training
it sums the gradients, n bytes per step. With latency α (s), bandwidth β (bytes/s) and K ranks:

    central            2α + 2(K-1) n/β                     root sends (K-1) n
    tree               2 ceil(log2 K) (α + n/β)            root sends ceil(log2 K) n
    ring               2(K-1) (α + n/(Kβ))                 each sends 2(K-1)/K n
    halving-doubling   2 log2(K) α + 2(K-1)/K n/β          each sends 2(K-1)/K n    (K a power of 2)
    hierarchical       a ring between nodes that carries only 1/(ranks per node) of the bytes

For small tensors latency dominates: the fastest way has the fewest messages one after the other.
For large tensors bandwidth dominates: the fastest way sends the fewest bytes, leaves no link idle
and makes no rank the bottleneck. If a rank can start all its messages at once without extra cost,
two more ways beat these: see `direct`. `cost_model` has the formulas as functions.

All work in place, for any K, on tensors of any shape, length (0 and less than K included),
strides, and dtype that can be added; `group=None` stands for all ranks. All members must call with
the same shape and dtype. All ranks end with the same bits, because each element is added up on one
rank and then copied. They raise ValueError on a rank outside the group, and TypeError for a sparse
tensor.

R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of Collective Communication Operations in
MPICH", Int. J. High Perform. Comput. Appl. 2005; M. Cho et al., "BlueConnect", MLSys 2019
(hierarchical).
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.collectives.point_to_point import (
    Group,
    exchange,
    flat_in_place,
    place_in,
    start_recv,
    start_send,
)
from course_lib.collectives.ring import all_gather, reduce_scatter, ring_all_reduce
from course_lib.collectives.rooted import broadcast, reduce
from course_lib.sharding import shard_bounds

AllReduce = Callable[[Tensor, Group], object]
"""`all_reduce(tensor, group)`: replaces everyone's tensor by the sum over the ranks, in place."""


def library_all_reduce(tensor: Tensor, group: Group = None) -> None:
    """Replace everyone's `tensor` by the sum, with the backend's own all-reduce (NCCL, gloo).

    The tensors must have one shape and dtype, and no gaps in memory: gloo would sum the bytes in
    the gaps instead of the elements. Ranks outside `group` get a warning.
    """
    dist.all_reduce(tensor, group=group)


def central_all_reduce(tensor: Tensor, group: Group = None) -> None:
    """Replace everyone's `tensor` (one shape and dtype) by the sum, which rank 0 adds up.

    Rank 0 receives K - 1 messages of n bytes and sends as many: 2α + 2(K-1) n/β. It posts all
    receives at once, so that no rank waits for the latency of others. This costs (K-1) n bytes of
    memory on rank 0. A parameter server has the same traffic. Raises as `reduce_scatter`.
    """
    rank, world_size = place_in(group)
    with flat_in_place(tensor) as flat:
        if rank != 0:
            dist.send(flat, group=group, group_dst=0)
            dist.recv(flat, group=group, group_src=0)
            return
        parts = flat.new_empty(world_size - 1, flat.numel())
        receives = [start_recv(part, r + 1, group) for r, part in enumerate(parts)]
        for part, receive in zip(parts, receives, strict=True):
            receive.wait()
            flat += part
        sends = [start_send(flat, to, group) for to in range(1, world_size)]
        for send in sends:
            send.wait()


def tree_all_reduce(tensor: Tensor, group: Group = None) -> None:
    """Replace everyone's `tensor` (one shape and dtype) by the sum: `reduce`, then `broadcast`.

    2 ceil(log2 K) (α + n/β): few messages one after the other, but each has the whole tensor.
    Raises as `reduce_scatter`.
    """
    place_in(group)  # raises on a rank outside the group, before the members are looked up
    root = dist.get_process_group_ranks(group)[0]
    with flat_in_place(tensor) as flat:
        reduce(flat, root, group)
        broadcast(flat, root, group)


def halving_doubling_all_reduce(tensor: Tensor, group: Group = None) -> None:
    """Replace everyone's `tensor` (one shape and dtype) by the sum: recursive halving and doubling.

    For K = 2^k: in the first step rank r and rank r XOR K/2 exchange halves of the tensor and add.
    From then on, each rank works on one half only. After k steps rank r holds chunk r of the sum.
    The same exchanges in reverse order gather all chunks. This sends the bytes of the ring with the
    latency of a tree: 2 log2(K) α + 2(K-1)/K n/β.

    For other K, the ranks beyond the largest power of two first send their tensor to a partner, and
    at the end receive the result from it. This takes 2(α + n/β) more, and each partner sends n
    bytes more. Raises as `reduce_scatter`.
    """
    rank, world_size = place_in(group)
    power = 1 << (world_size.bit_length() - 1)  # the largest power of two ≤ K
    with flat_in_place(tensor) as flat:
        if rank >= power:
            dist.send(flat, group=group, group_dst=rank - power)
            dist.recv(flat, group=group, group_src=rank - power)
            return
        buffer = torch.empty_like(flat)
        if rank + power < world_size:
            dist.recv(buffer, group=group, group_src=rank + power)
            flat += buffer
        n = flat.numel()
        starts = [shard_bounds(n, power, r)[0] for r in range(power)] + [n]
        first, last = 0, power  # this rank still works on chunks first … last - 1
        steps = []
        while last - first > 1:
            middle = (first + last) // 2
            low = flat[starts[first] : starts[middle]]
            high = flat[starts[middle] : starts[last]]
            keep, give = (low, high) if rank < middle else (high, low)
            partner = rank ^ (middle - first)
            incoming = buffer[: keep.numel()]
            exchange(give, partner, incoming, partner, group)
            keep += incoming
            steps.append((keep, give, partner))
            first, last = (first, middle) if rank < middle else (middle, last)
        for half, other, partner in reversed(steps):
            exchange(half, partner, other, partner, group)
        if rank + power < world_size:
            dist.send(flat, group=group, group_dst=rank + power)


def two_level_groups(ranks_per_node: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return `(inside, between)`: this rank's group within its node, and its group across nodes.

    Each node holds `ranks_per_node` consecutive ranks. `between` joins the ranks that have the same
    number in their nodes. All ranks must call this, because PyTorch creates a group on all ranks
    together. Call it once, and keep the groups. `ranks_per_node` divides the number of ranks.
    """
    rank, world_size = place_in(None)
    nodes = [range(i, i + ranks_per_node) for i in range(0, world_size, ranks_per_node)]
    across = [range(i, world_size, ranks_per_node) for i in range(ranks_per_node)]
    inside = [dist.new_group(list(members)) for members in nodes]
    between = [dist.new_group(list(members)) for members in across]
    return inside[rank // ranks_per_node], between[rank % ranks_per_node]


def hierarchical_all_reduce(
    tensor: Tensor, inside: dist.ProcessGroup, between: dist.ProcessGroup
) -> None:
    """Replace everyone's `tensor` (one shape and dtype) by the sum, with few bytes between nodes.

    It runs a reduce-scatter inside the node, then a ring all-reduce of each rank's chunk with the
    same rank of the other nodes, then an all-gather inside the node. With L ranks per node each
    rank sends only 2(M-1)/M n/L bytes over the network between the M nodes. For the time see
    `cost_model.hierarchical_all_reduce_time`. `inside` and `between` are the groups of
    `two_level_groups`. Raises as `reduce_scatter`.
    """
    with flat_in_place(tensor) as flat:
        ring_all_reduce(reduce_scatter(flat, inside), between)
        all_gather(flat, inside)
