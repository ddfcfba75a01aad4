"""All-reduce in five ways, from messages between two ranks.

    >>> from course_lib.collectives import halving_doubling_all_reduce
    >>> halving_doubling_all_reduce(gradient)  # in place; every rank then holds the sum

An all-reduce replaces everyone's tensor by the sum over all ranks. In data-parallel training it
carries the gradients, n bytes per step. With latency α (s), bandwidth β (bytes/s) and K ranks:

    central            2α + 2(K-1) n/β                     root sends (K-1) n
    tree               2 ceil(log2 K) (α + n/β)            root sends ceil(log2 K) n
    ring               2(K-1) (α + n/(Kβ))                 each sends 2(K-1)/K n
    halving-doubling   2 log2(K) α + 2(K-1)/K n/β          each sends 2(K-1)/K n    (K a power of 2)
    hierarchical       a ring between nodes that carries only 1/(ranks per node) of the bytes

Small tensors are all latency: few messages one after the other win. Large ones are all bandwidth:
few bytes win, where no link rests and no rank is the bottleneck. Where a rank can start all its
messages at once for nothing, two more ways beat these: see `direct`. `cost_model` has the formulas
as functions; `tuned` chooses by them.

All five work in place on tensors of any shape, length (0 and less than K included), strides and
dtype that can be added, for any K; `group=None` stands for all ranks. All members must call with
the same shape and dtype. All ranks end with the same bits, because each element is added up on one
rank and then copied. They raise ValueError on a rank outside the group, TypeError for a sparse
tensor.

R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of Collective Communication Operations in
MPICH", Int. J. High Perform. Comput. Appl. 2005; M. Cho et al., "BlueConnect", MLSys 2019
(hierarchical).
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.collectives.pipelined_ring import pipelined_ring_all_reduce
from course_lib.collectives.point_to_point import (
    Group,
    exchange,
    flat_in_place,
    place_in,
    start_recv,
    start_send,
)
from course_lib.collectives.ring import all_gather, reduce_scatter, simple_ring_all_reduce
from course_lib.collectives.rooted import (
    broadcast,
    reduce,
)
from course_lib.sharding import shard_bounds

AllReduce = Callable[[Tensor, Group], object]
"""`all_reduce(tensor, group)`: replaces everyone's tensor by the sum over the ranks, in place."""
SEGMENT_BYTES = 2 << 20
"""Bytes of the segments in which `ring_all_reduce` sends longer chunks, unless told how many."""


def library_all_reduce(tensor: Tensor, group: Group = None) -> None:
    """Replace everyone's `tensor` by the sum, with the backend's own all-reduce (NCCL, gloo).

    It has one shape and dtype, and no gaps in memory: gloo would sum what lies in them, and not the
    elements. Ranks outside `group` get a warning.
    """
    dist.all_reduce(tensor, group=group)


def central_all_reduce(tensor: Tensor, group: Group = None) -> None:
    """Replace everyone's `tensor` (one shape and dtype) by the sum, which rank 0 adds up.

    It receives K - 1 messages of n bytes and sends as many: 2α + 2(K-1) n/β. The receives are all
    posted at once, so that nobody waits for the others' latency: (K-1) n bytes of memory on rank 0.
    This is the parameter server's traffic. Raises as `reduce_scatter`.
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

    2 ceil(log2 K) (α + n/β): few messages one after the other, but whole ones. Raises as
    `reduce_scatter`.
    """
    place_in(group)  # a rank that is no member learns so before the group's members are looked up
    root = dist.get_process_group_ranks(group)[0]
    with flat_in_place(tensor) as flat:
        reduce(flat, root, group)
        broadcast(flat, root, group)


def ring_all_reduce(tensor: Tensor, group: Group = None, segments: int | None = None) -> None:
    """Replace everyone's `tensor` (one shape and dtype) by the sum, around a ring.

    2(K-1) (α + n/(Kβ)), 2(K-1)/K n bytes from each rank: see `ring`. Large tensors travel in
    `segments` pieces per chunk, so that adding overlaps receiving: see `pipelined_ring`. By default
    they have about `SEGMENT_BYTES`. Raises as `reduce_scatter`, and ValueError if segments < 1.
    """
    if segments is None:
        _, world_size = place_in(group)
        # Not nbytes, which a sparse tensor lacks: it is refused below, in plain words.
        size = tensor.numel() * tensor.element_size()
        chunk = size // world_size
        segments = max(1, chunk // SEGMENT_BYTES)
    if segments == 1:
        simple_ring_all_reduce(tensor, group)
    else:
        pipelined_ring_all_reduce(tensor, group, segments)


def halving_doubling_all_reduce(tensor: Tensor, group: Group = None) -> None:
    """Replace everyone's `tensor` (one shape and dtype) by the sum: recursive halving and doubling.

    For K = 2^k: in the first step rank r and rank r XOR K/2 exchange halves of the tensor and add;
    each then deals with one half only. After k steps rank r holds chunk r of the sum, and the same
    way back gathers all chunks. The bytes of the ring with the latency of a tree:
    2 log2(K) α + 2(K-1)/K n/β.

    For other K the ranks beyond the largest power of two first give their tensor to a partner, and
    get the result from it: 2(α + n/β) more, and n bytes more from those partners. Raises as
    `reduce_scatter`.
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
        first, last = 0, power  # this rank still deals with chunks first … last - 1
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
        for mine, other, partner in reversed(steps):
            exchange(mine, partner, other, partner, group)
        if rank + power < world_size:
            dist.send(flat, group=group, group_dst=rank + power)


def two_level_groups(ranks_per_node: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return `(inside, between)`: this rank's group within its node, and across the nodes.

    Nodes hold `ranks_per_node` consecutive ranks each. `between` joins the ranks that have the same
    number in their nodes. All ranks must call, since PyTorch makes groups together; call once, and
    keep them. Raises ValueError if a node would not be full.
    """
    rank, world_size = place_in(None)
    if ranks_per_node < 1 or world_size % ranks_per_node:
        raise ValueError(
            f"{world_size} ranks do not fill nodes of {ranks_per_node} ranks: every node must hold "
            "the same number of ranks. Use a number of ranks that ranks_per_node divides"
        )
    nodes = [range(i, i + ranks_per_node) for i in range(0, world_size, ranks_per_node)]
    across = [range(i, world_size, ranks_per_node) for i in range(ranks_per_node)]
    inside = [dist.new_group(list(members)) for members in nodes]
    between = [dist.new_group(list(members)) for members in across]
    return inside[rank // ranks_per_node], between[rank % ranks_per_node]


def hierarchical_all_reduce(
    tensor: Tensor, inside: dist.ProcessGroup, between: dist.ProcessGroup
) -> None:
    """Replace everyone's `tensor` (one shape and dtype) by the sum, sparing links between nodes.

    Reduce-scatter inside the node, ring all-reduce of the own chunk with the same rank of the other
    nodes, all-gather inside. With L ranks per node each rank sends only 2(M-1)/M n/L bytes over the
    network between the M nodes; time: `cost_model.hierarchical_all_reduce_time`. `inside` and
    `between` as from `two_level_groups`. Raises as `reduce_scatter`.
    """
    with flat_in_place(tensor) as flat:
        ring_all_reduce(reduce_scatter(flat, inside), between)
        all_gather(flat, inside)
