"""The ring in segments: each chunk is sent on piece by piece, while the rest of it comes in.

The plain ring (`ring`) waits for a whole chunk, adds it, and only then sends it on: while it adds,
its links rest. Cut into s segments, a chunk leaves as soon as its first segment is added, and the
additions hide behind the messages. Every rank sends the same (K-1)s messages in each half:

    message m = step * s + segment;  what arrives as message m leaves as message m + s

so no rank waits for a chunk, only for a segment. The sums are taken in the same order as in the
plain ring, and have the same bits. Segments shorter than about a megabyte do harm: a message costs
its sender and its receiver work, which then outweighs what is hidden.

P. Patarasu and X. Yuan, 2009 (see `ring`); NCCL and gloo pipeline their rings likewise.
"""

import torch.distributed as dist
from torch import Tensor

from course_lib.point_to_point import Group, flat_in_place, place_in, start_recv, start_send
from course_lib.ring import simple_ring_all_reduce
from course_lib.sharding import shard


def pipelined_ring_all_reduce(tensor: Tensor, group: Group = None, segments: int = 4) -> None:
    """Replace everyone's `tensor` (one shape and dtype) by the sum over all ranks, in place.

    Chunks travel in `segments` pieces each. On a GPU this is the plain ring: NCCL cuts messages
    into pieces itself. Raises ValueError if segments < 1.
    """
    if segments < 1:
        raise ValueError(f"segments={segments}: a chunk is sent in at least one piece")
    if tensor.is_cuda:
        simple_ring_all_reduce(tensor, group)
        return
    with flat_in_place(tensor) as flat:
        pipelined_reduce_scatter(flat, group, segments)
        pipelined_all_gather(flat, group, segments)


def pipelined_reduce_scatter(flat: Tensor, group: Group, segments: int) -> None:
    """Leave chunk r of the sum in chunk r of rank r's `flat`, a vector; the rest is partial sums.

    Two receive buffers of one segment each are used in turn: one fills while the other is added.
    """
    rank, world_size = place_in(group)
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    total = (world_size - 1) * segments
    outgoing = [
        _piece(flat, world_size, rank - 1, i, segments) for i in range(min(segments, total))
    ]
    arriving = [_piece(flat, world_size, rank - 2, i, segments) for i in range(total)]
    # The first segment of chunk 0 is the longest there is.
    buffers = [_piece(flat, world_size, 0, 0, segments).clone() for _ in range(min(2, total))]

    def receive(number: int) -> dist.Work:
        return start_recv(buffers[number % 2][: arriving[number].numel()], left, group)

    receives = [receive(number) for number in range(len(buffers))]
    sends = [start_send(piece, right, group) for piece in outgoing]
    for number, mine in enumerate(arriving):
        receives[number % 2].wait()
        mine += buffers[number % 2][: mine.numel()]
        if number + segments < total:
            sends.append(start_send(mine, right, group))
        if number + 2 < total:
            receives[number % 2] = receive(number + 2)
    # Only now may they be overwritten, as the all-gather will.
    for send in sends:
        send.wait()


def pipelined_all_gather(flat: Tensor, group: Group, segments: int) -> None:
    """Fill everyone's `flat`, a vector, with chunk r from rank r, for each rank r."""
    rank, world_size = place_in(group)
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    total = (world_size - 1) * segments
    outgoing = [_piece(flat, world_size, rank, i, segments) for i in range(min(segments, total))]
    arriving = [_piece(flat, world_size, rank - 1, i, segments) for i in range(total)]
    receives = [start_recv(piece, left, group) for piece in arriving]
    sends = [start_send(piece, right, group) for piece in outgoing]
    for number, receive in enumerate(receives):
        receive.wait()
        if number + segments < total:
            sends.append(start_send(arriving[number], right, group))
    for send in sends:
        send.wait()


def _piece(flat: Tensor, world_size: int, first: int, number: int, segments: int) -> Tensor:
    """Return the view of message `number`, if the first messages are those of chunk `first`."""
    step, segment = divmod(number, segments)
    chunk = shard(flat, world_size, (first - step) % world_size)
    return shard(chunk, segments, segment)
