"""The ring in segments: each chunk is sent on piece by piece, while the rest of it arrives.

    >>> from course_lib.collectives import pipelined_ring_all_reduce
    >>> pipelined_ring_all_reduce(gradient, segments=4)  # in place; every rank then holds the sum

The plain ring (`ring`) waits for a whole chunk, adds it, and only then sends it on. While a rank
adds, its links are idle, and each of the 2(K-1) steps pays the latency again. If a chunk is cut
into s segments, a rank begins to send the chunk on as soon as its first segment is added. Every
rank sends 2(K-1)s messages, without a stop between the two halves of the all-reduce:

    message m = step * s + segment;  a segment that arrives as message m is sent on as message m + s

So a rank waits for a segment, never for a chunk. `WINDOW` segments are on their way to every rank
at once. If they are enough to bridge the latency, no link is idle, and the latency is paid only
once:

    2(K-1) n/(Kβ) + α             (in general: cost_model.pipelined_ring_all_reduce_time)

for n bytes, with latency α (s) and bandwidth β (bytes/s).

The sums are computed in the same order as in the plain ring, and have the same bits. Segments
shorter than about a megabyte make it slower: every message is work for its sender and its receiver,
and this work then costs more time than the overlap saves.

P. Patarasuk and X. Yuan, 2009 (see `ring`); NCCL and gloo pipeline their rings likewise.
"""

from torch import Tensor

from course_lib.collectives.point_to_point import (
    Group,
    flat_in_place,
    place_in,
    start_recv,
    start_send,
)
from course_lib.collectives.ring import simple_ring_all_reduce
from course_lib.sharding import shard

WINDOW = 4
"""How many segments may be on their way to a rank at once, and so its number of receive buffers."""


def pipelined_ring_all_reduce(tensor: Tensor, group: Group = None, segments: int = 4) -> None:
    """Replace everyone's `tensor` (one shape and dtype) by the sum over all ranks, in place.

    Each chunk is sent in `segments` pieces; a rank sends as many bytes as in the plain ring. On a
    GPU this runs the plain ring, because NCCL cuts messages into pieces itself. Raises ValueError
    if segments < 1 or this rank is not in `group`, and TypeError for a sparse tensor.
    """
    if segments < 1:
        raise ValueError(
            f"segments={segments} must be at least 1: a chunk is cut into that many pieces"
        )
    rank, world_size = place_in(group)
    if tensor.is_cuda:
        simple_ring_all_reduce(tensor, group)
        return
    with flat_in_place(tensor) as flat:
        if world_size > 1:
            _pass_on(flat, rank, world_size, group, segments)


def _pass_on(flat: Tensor, rank: int, world_size: int, group: Group, segments: int) -> None:
    """Receive 2(K-1)s messages, add the first half of them, keep the others, and send all on."""
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    half = (world_size - 1) * segments
    window = min(segments, WINDOW)
    places = [_place(flat, rank, world_size, number, segments) for number in range(2 * half)]
    # No segment is longer than the first of chunk 0.
    longest = shard(shard(flat, world_size, 0), segments, 0).numel()
    buffers = [flat.new_empty(longest) for _ in range(window)]
    # The first chunk that a rank sends is its own, so nothing has to arrive before.
    sends = [
        start_send(_place(flat, rank, world_size, number, segments), right, group)
        for number in range(-segments, 0)
    ]

    def arriving(number: int) -> Tensor:
        """Return where message `number` is received."""
        if number < half:
            return buffers[number % window][: places[number].numel()]
        sends[number - half].wait()  # this send reads the same memory, and may not be done
        return places[number]

    receives = [start_recv(arriving(number), left, group) for number in range(window)]
    for number, place in enumerate(places):
        receives[number].wait()
        if number < half:
            place += arriving(number)
        if number + segments < 2 * half:
            sends.append(start_send(place, right, group))
        if number + window < 2 * half:
            receives.append(start_recv(arriving(number + window), left, group))
    for send in sends[half:]:
        send.wait()


def _place(flat: Tensor, rank: int, world_size: int, number: int, segments: int) -> Tensor:
    """Return the part of `flat` to which the arriving message `number` belongs."""
    step, segment = divmod(number, segments)
    chunk = shard(flat, world_size, (rank - 2 - step) % world_size)
    return shard(chunk, segments, segment)
