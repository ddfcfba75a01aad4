"""Direct all-reduce: every rank sends to every other at once, so the latencies overlap.

    >>> from course_lib.collectives import direct_all_reduce, one_shot_all_reduce
    >>> direct_all_reduce(gradient)  # in place; every rank then holds the sum

A ring sends 2(K-1) messages one after the other, and waits for the latency of each. But a rank can
also start all its messages at once. Then they share the link, and their latencies overlap. With
latency α (s), bandwidth β (bytes/s), K ranks and n bytes:

    direct      2α + 2(K-1) n/(Kβ)     each sends 2(K-1)/K n
    one-shot     α + (K-1) n/β         each sends (K-1) n

**Direct**: each rank sends its chunk r to rank r, which adds up K chunks and sends the sum to all.
This is the ring's reduce-scatter and all-gather without the ring: the same bytes in two batches of
messages. **One-shot**: each rank sends its whole tensor to all others, and adds up all K tensors by
itself. This takes one batch and K/2 times the bytes, so it is for small tensors.

The price is the number of messages. A rank starts K - 1 messages in a batch and sends to all other
ranks. In a ring it exchanges messages with two neighbours only. Starting a message is work for the
rank, `overhead` seconds in a `Network`, and on a network of many switches the messages compete for
links. So rings and trees are better again if K is large.

All ranks end with the same bits, because all sums are computed in the order of the ranks.

R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of Collective Communication Operations in
MPICH", 2005 (pairwise exchange). Between the GPUs of one machine both are known as one-shot and
two-shot all-reduce: TensorRT-LLM (issue 2521 on GitHub) and vLLM's custom all-reduce
(github.com/vllm-project/vllm/pull/2192).
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.collectives.point_to_point import Group, flat_in_place, pair_of, place_in
from course_lib.sharding import shard


def direct_all_reduce(tensor: Tensor, group: Group = None) -> None:
    """Replace everyone's `tensor` (one shape and dtype) by the sum: chunk r is added up on rank r.

    2α + 2(K-1) n/(Kβ), 2(K-1)/K n bytes from each rank. A rank needs n bytes of memory in addition
    to the tensor. Raises ValueError if this rank is not in `group`, and TypeError for a sparse
    tensor.
    """
    in_two_phases(tensor, _add_up, group)


def in_two_phases(
    tensor: Tensor, combine: Callable[[list[Tensor], Tensor], None], group: Group = None
) -> None:
    """Replace everyone's `tensor` by what ``combine(parts, result)`` makes of the ranks' chunks.

    Rank r gets all K chunks r, in the order of the ranks, and writes one chunk to `result`, which
    goes to all. No part shares memory with it. Costs and errors are those of `direct_all_reduce`.
    """
    rank, world_size = place_in(group)
    with flat_in_place(tensor) as flat:
        chunks = [shard(flat, world_size, r) for r in range(world_size)]
        own = chunks[rank]
        parts = [own.clone() if r == rank else own.new_empty(own.shape) for r in range(world_size)]
        exchange_with_all(chunks, parts, group)
        combine(parts, own)
        exchange_with_all([own] * world_size, chunks, group)


def one_shot_all_reduce(tensor: Tensor, group: Group = None) -> None:
    """Replace everyone's `tensor` (one shape and dtype) by the sum, which each rank adds up itself.

    α + (K-1) n/β, (K-1) n bytes from each rank. A rank needs K n bytes of memory in addition to the
    tensor. Raises as `direct_all_reduce`.
    """
    rank, world_size = place_in(group)
    with flat_in_place(tensor) as flat:
        parts = [torch.empty_like(flat) for _ in range(world_size)]
        parts[rank].copy_(flat)
        exchange_with_all([flat] * world_size, parts, group)
        _add_up(parts, flat)


def exchange_with_all(outgoing: list[Tensor], incoming: list[Tensor], group: Group = None) -> None:
    """Send `outgoing[r]` to rank r and receive `incoming[r]` from it, for all other ranks at once.

    All tensors are contiguous. `incoming` is overwritten; each of its tensors has the length and
    dtype of the tensor that is sent to it. This rank's own entries are not used. Ranks are numbered
    inside `group`. In pair s of the batch, rank r sends to r + s and receives from r - s, so that
    no two messages of a pair share a link. The batch takes α + (K-1) n/β seconds for messages of n
    bytes, because their latencies overlap.

    Raises ValueError if this rank is not in `group`.
    """
    rank, world_size = place_in(group)
    batch = []
    for step in range(1, world_size):
        to, source = (rank + step) % world_size, (rank - step) % world_size
        batch += pair_of(outgoing[to], to, incoming[source], source, group)
    if batch:
        for work in dist.batch_isend_irecv(batch):
            work.wait()


def _add_up(parts: list[Tensor], total: Tensor) -> None:
    """Write the sum of the `parts`, added in their order, to `total`."""
    first, *later_parts = parts
    total.copy_(first)
    for other in later_parts:
        total += other
