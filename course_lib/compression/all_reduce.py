"""Compressed all-reduce: sums of compressed tensors, which are compressed again.

    >>> from course_lib.compression import ErrorFeedback, OneBit, compressed_all_reduce
    >>> compressed_all_reduce(gradient, ErrorFeedback(OneBit()), key="bucket 0")  # in place

Compressed tensors can usually not be added: the sum of two lists of top-k is a longer list, and the
sum of two bytes may not fit a byte. If every rank sends its whole payload to all others, as
PyTorch's quantization hooks do, K - 1 payloads arrive. Then the bytes grow with K and soon exceed
those of a ring. So the sum has two phases, like the ring, with one K-th of the tensor per message:

    each rank cuts g into K shards, and compresses each                         C(g)
    all-to-all: shard r of everyone goes to rank r                  (K-1) · ⌈C/K⌉ bytes sent
    rank r decodes and adds up, in float32, and compresses the sum       C(Σ C(g))
    all-gather: everyone gets every sum                             (K-1) · ⌈C/K⌉ bytes sent

with C = `compressor.nbytes`. A ring sends 2 (K-1)/K · n bytes. So this sends C/n of the bytes of a
ring, for every K. Both compressions lose something. `ErrorFeedback` keeps the loss of this rank's
shards, and the loss of the sum that this rank computes.

If payloads *can* be added (`Compressor.linear`: random-k, PowerSGD), an ordinary all-reduce sums
them.

All ranks end with the same bits, because all of them, also the sender, use the decoded sums. If a
rank's tensor is not finite, neither is the result, on any rank, and no later result suffers from
it.

S. Gan et al., "BAGUA", VLDB 2021 (centralized low precision); H. Tang et al., "1-bit Adam:
Communication Efficient Large-Scale Training with Adam's Convergence Speed", ICML 2021.
"""

from collections.abc import Callable, Hashable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.collectives import AllReduce, Group, flat_in_place, library_all_reduce, place_in
from course_lib.compression.payload import Codec, Compressor, Payload, as_vector
from course_lib.sharding import shard


def compressed_all_reduce(
    tensor: Tensor,
    compressor: Compressor,
    group: Group = None,
    key: Hashable = None,
    all_reduce: AllReduce = library_all_reduce,
) -> None:
    """Replace `tensor` on every rank by C(Σ C(tensor)), in place.

    Args:
        tensor: of any shape, floating dtype and device; the same shape and dtype on all ranks.
        compressor: this rank's compressor, with the same settings on all ranks.
        group: None for all ranks.
        key: names the stream of tensors: see `Compressor`. The same on all ranks.
        all_reduce: sums the payloads of a linear compressor.

    Raises ValueError on a rank outside `group`, TypeError for a tensor that cannot be compressed.

    """
    _, world_size = place_in(group)
    as_vector(tensor)  # raises on all ranks, before any message, if it cannot be compressed
    if compressor.linear:
        total, _ = compressor.sum_over(tensor.detach(), key, lambda part: all_reduce(part, group))
        tensor.copy_(total)
        return
    with flat_in_place(tensor) as flat:
        shards = [shard(flat, world_size, rank) for rank in range(world_size)]
        total = _sum_of_mine(shards, compressor, group, key)
        own_sum = compressor.encode(total, (key, "sum"))
        for target, payload in zip(
            shards, _from_everyone(own_sum, shards, compressor, group), strict=True
        ):
            compressor.decode_into(payload, target)
        compressor.drop_overflow(key, flat)


def sum_by_codec(
    x: Tensor,
    encode: Callable[[Tensor], Tensor],
    decode: Callable[[Tensor, Sequence[int], torch.dtype], Tensor],
    group: Group = None,
) -> None:
    """Replace `x` on every rank by C(Σ C(x)), in place, where C is a `Codec` of two functions."""
    compressed_all_reduce(x, Codec(encode, decode), group)


def _sum_of_mine(
    shards: Sequence[Tensor], compressor: Compressor, group: Group, key: Hashable
) -> Tensor:
    """Send every shard, compressed, to its rank; return the sum of this rank's shard in float32."""
    rank, _ = place_in(group)

    def encoded(owner: int) -> Payload:
        return compressor.encode(shards[owner], (key, "part", owner))

    wires = [_room(compressor, shards[rank]) for _ in shards]
    works = _start_swaps(lambda to: encoded(to).wire, wires, group)
    part = encoded(rank)
    wires[rank] = part.wire
    for work in works:
        work.wait()
    total = torch.empty(part.shape.numel(), device=part.wire.device)
    for number, wire in enumerate(wires):  # in the order of the ranks
        payload = Payload(wire, part.shape, total.dtype, part.agreed)
        compressor.decode_into(payload, total, add=number > 0)
    return total.view(part.shape)


def _from_everyone(
    own_sum: Payload, shards: Sequence[Tensor], compressor: Compressor, group: Group
) -> list[Payload]:
    """Send this rank's sum to all ranks; return the sums of all ranks, in rank order."""
    wires = [_room(compressor, part) for part in shards]
    wires[place_in(group)[0]] = own_sum.wire
    for work in _start_swaps(lambda _: own_sum.wire, wires, group):
        work.wait()
    return [
        Payload(wire, part.shape, own_sum.dtype, own_sum.agreed)
        for wire, part in zip(wires, shards, strict=True)
    ]


def _room(compressor: Compressor, like: Tensor) -> Tensor:
    """Return memory for the payload of a tensor like this one."""
    return torch.empty(compressor.nbytes(like.shape), dtype=torch.uint8, device=like.device)


def _start_swaps(
    outgoing: Callable[[int], Tensor], incoming: Sequence[Tensor], group: Group
) -> list[dist.Work]:
    """Start to send `outgoing(r)` to each other rank r, and to receive `incoming[r]` from it.

    A message leaves as soon as it is made, while the next one is being compressed. Each rank begins
    with its right neighbour, so that not all send to the same rank at once. Single messages pay the
    latency once, together: ``all_to_all_single`` would run K-1 rounds, each with its own latency.
    Empty messages are not sent.
    """
    rank, world_size = place_in(group)
    works: list[dist.Work] = []
    for hop in range(1, world_size):
        to, source = (rank + hop) % world_size, (rank - hop) % world_size
        ends = (dist.isend, outgoing(to), to), (dist.irecv, incoming[source], source)
        pair = [
            dist.P2POp(start, wire, group=group, group_peer=peer)
            for start, wire, peer in ends
            if wire.numel()
        ]
        works += dist.batch_isend_irecv(pair) if pair else []
    return works
