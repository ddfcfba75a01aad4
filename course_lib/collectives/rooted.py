"""Collectives with a root: broadcast and reduce, between one rank and all others.

    >>> from course_lib.collectives import broadcast
    >>> broadcast(tensor, src=0)  # in place; every rank then holds rank 0's numbers

How long does it take to copy n bytes from one rank to K - 1 others? Each message takes α + n/β
seconds (latency α in s, bandwidth β in bytes/s), and a rank sends one message at a time.

    naive        the root sends to everyone                α + (K-1) n/β
    tree         every rank that has the data sends it on  ceil(log2 K) (α + n/β)
    pipelined    a chain, in s segments                    (K-1) α + (s + K - 2) n/(sβ)  →  n/β

The naive broadcast keeps one link busy and all others idle. In the binomial tree the number of
ranks that have the data doubles in each round. In the pipelined chain all links work at once, on
different segments. So a long message takes hardly longer than to one rank, for any K.

`reduce` is a broadcast that runs backwards, and adds instead of copying.

M. Barnett et al., "Interprocessor collective communication library (InterCom)", SHPCC 1994;
R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of Collective Communication Operations in
MPICH", 2005.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.collectives.point_to_point import (
    Group,
    flat_in_place,
    place_in,
    root_in,
    start_recv,
    start_send,
)


def naive_broadcast(tensor: Tensor, src: int = 0, group: Group = None) -> None:
    """Copy rank `src`'s `tensor` (one shape and dtype on all ranks) into everyone's, in place.

    The root sends K - 1 messages of n bytes: α + (K-1) n/β. Raises ValueError if this rank or `src`
    is not in `group`, and TypeError for a sparse tensor.
    """
    rank, world_size = place_in(group)
    root = root_in(group, src)
    with flat_in_place(tensor) as flat:
        if rank != root:
            dist.recv(flat, group=group, group_src=root)
            return
        sends = [start_send(flat, to, group) for to in range(world_size) if to != root]
        for send in sends:
            send.wait()


def tree_broadcast(tensor: Tensor, src: int = 0, group: Group = None) -> None:
    """Copy rank `src`'s `tensor` into everyone's, in place, along a binomial tree.

    In round i the 2^i ranks that have the data send it to 2^i others. This takes ceil(log2 K)
    rounds of α + n/β; the root sends n bytes in each. Shapes and errors as in `naive_broadcast`.
    """
    rank, world_size = place_in(group)
    root = root_in(group, src)
    position = (rank - root) % world_size  # counted from the root
    with flat_in_place(tensor) as flat:
        width = 1  # positions 0 … width - 1 have the data
        while width < world_size:
            if position < width:
                if position + width < world_size:
                    to = (rank + width) % world_size
                    dist.send(flat, group=group, group_dst=to)
            elif position < 2 * width:
                dist.recv(flat, group=group, group_src=(rank - width) % world_size)
            width *= 2


def pipelined_broadcast(
    tensor: Tensor, src: int = 0, group: Group = None, segments: int = 8
) -> None:
    """Copy rank `src`'s `tensor` into everyone's, in place, along a chain, in `segments` pieces.

    Rank r passes segment i on while it receives segment i + 1: (K-1) α + (s + K - 2) n/(sβ).
    Each rank except the last sends n bytes. Shapes and errors as in `naive_broadcast`.
    """
    rank, world_size = place_in(group)
    root = root_in(group, src)
    position = (rank - root) % world_size
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    with flat_in_place(tensor) as flat:
        pieces = flat.tensor_split(segments)
        # Post all receives at once, so that the neighbour's sends do not have to wait for them.
        receives = [start_recv(piece, left, group) for piece in pieces] if position else []
        sends = []
        for i, piece in enumerate(pieces):
            if position:
                receives[i].wait()
            if position < world_size - 1:
                sends.append(start_send(piece, right, group))
        for send in sends:
            send.wait()


def broadcast(tensor: Tensor, src: int = 0, group: Group = None) -> None:
    """Copy rank `src`'s `tensor` into everyone's, in place; the same as `tree_broadcast`."""
    tree_broadcast(tensor, src, group)


def reduce(tensor: Tensor, dst: int = 0, group: Group = None) -> None:
    """Leave the sum over all ranks' `tensor` (of one shape and dtype) in rank `dst`'s, in place.

    It uses the binomial tree backwards: ceil(log2 K) (α + n/β). On the other ranks the tensor holds
    partial sums afterwards. Raises ValueError if this rank or `dst` is not in `group`, and
    TypeError for a sparse tensor.
    """
    rank, world_size = place_in(group)
    root = root_in(group, dst)
    position = (rank - root) % world_size
    with flat_in_place(tensor) as flat:
        incoming = torch.empty_like(flat)
        width = 1 << (world_size - 1).bit_length()
        while width > 1:
            width //= 2
            if width <= position < 2 * width:
                dist.send(flat, group=group, group_dst=(rank - width) % world_size)
            elif position < width and position + width < world_size:
                dist.recv(incoming, group=group, group_src=(rank + width) % world_size)
                flat += incoming
