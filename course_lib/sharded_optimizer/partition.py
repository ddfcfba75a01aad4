"""Flat buffers in K chunks: which part of which parameter belongs to this rank.

Parameters lie one after the other in a flat buffer. The buffer is cut into K equal chunks, which
may begin or end inside a parameter:

    parameters   |   weight 1       | b1 |      weight 2          | b2 |padding
    chunks       |     rank 0     |     rank 1     |     rank 2     |

So every rank has the same number of elements, except for the padding (fewer than K), for parameters
of any size. If ranks got whole tensors, one rank would have the largest. This works for optimizers
that treat each element by itself. The part of one parameter in a chunk is a *piece*.

The parameters become views of the buffer, so a collective on it needs no copies.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.bucketing import Bucket, lay_out_like
from course_lib.collectives import Group, all_gather, place_in, reduce_scatter
from course_lib.sharding import shard


class FlatChunks:
    """Tensors of one dtype and device as one flat buffer in K equal chunks.

    Attributes:
        indices: the indices of its tensors.
        flat: shape (length rounded up to a multiple of K,); the end beyond the length is zero.
        bucket: the views of `flat`, one for each tensor.
        pieces: index → (start, stop), the range of the tensor's elements, in memory order, that are
            in this rank's chunk. It may be empty.

    """

    def __init__(self, tensors: Sequence[Tensor], indices: Sequence[int], group: Group) -> None:
        """Copy `tensors[i]`, i in `indices`, into the buffer, without changing them."""
        rank, world_size = place_in(group)
        self.group, self.indices = group, list(indices)
        length = sum(tensors[i].numel() for i in indices)
        chunk = -(-length // world_size)
        self.flat = tensors[indices[0]].new_zeros(chunk * world_size)
        self.bucket = Bucket(tensors, indices, self.flat[:length])
        with torch.no_grad():
            for index, view in zip(self.indices, self.bucket.views, strict=True):
                view.copy_(tensors[index])
        self.pieces = {}
        self.starts = {}
        offset, start, stop = 0, rank * chunk, (rank + 1) * chunk
        for index in self.indices:
            size = tensors[index].numel()
            first = min(max(start - offset, 0), size)
            last = max(min(stop - offset, size), first)
            self.pieces[index] = (first, last)
            self.starts[index] = offset + first - start  # in the chunk, if there is a piece
            offset += size

    def chunk(self, flat: Tensor | None = None) -> Tensor:
        """Return this rank's chunk, a view, of `flat`, which is as long as the own buffer.

        None means the own buffer.
        """
        rank, world_size = place_in(self.group)
        return shard(self.flat if flat is None else flat, world_size, rank)

    def piece(self, index: int, chunk: Tensor) -> Tensor:
        """Return the piece of tensor `index` in a chunk: a view of shape (stop - start,)."""
        first, last = self.pieces[index]
        start = max(self.starts[index], 0)
        return chunk[start : start + last - first]


def as_it_lies(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the elements of `tensor`, shape (numel,), in the memory order of `like`.

    The result is a view if possible. Both tensors have the same shape.
    """
    if tensor.is_contiguous() and like.is_contiguous():
        return tensor.view(-1)
    flat = tensor.new_empty(tensor.numel())
    lay_out_like(like, flat).copy_(tensor)
    return flat


def all_gather_chunks(flat: Tensor, group: Group = None) -> None:
    """Fill everyone's `flat`, shape (K c,), with chunk r from rank r, in place.

    Each rank sends (K-1)/K of its bytes. NCCL has its own all-gather; over gloo our ring is faster.
    """
    rank, world_size = place_in(group)
    if flat.is_cuda:
        start_all_gather(flat, shard(flat, world_size, rank), group).wait()
    else:
        all_gather(flat, group)


def reduce_scatter_chunks(flat: Tensor, group: Group = None) -> Tensor:
    """Return this rank's chunk, shape (c,), of the sum over the ranks of `flat`, shape (K c,).

    `flat` is overwritten, and the result is a view of it. Each rank sends (K-1)/K of its bytes.
    """
    rank, world_size = place_in(group)
    if not flat.is_cuda:
        return reduce_scatter(flat, group)
    own_chunk = shard(flat, world_size, rank)
    start_reduce_scatter(own_chunk, flat, group).wait()
    return own_chunk


def start_all_gather(flat: Tensor, chunk: Tensor, group: Group = None) -> dist.Work:
    """Begin to fill `flat`, shape (K c,), with everyone's `mine`, shape (c,), by the backend.

    Do not use either tensor before `.wait()`.
    """
    work: dist.Work = _ALL_GATHER(flat, chunk, group=group, async_op=True)
    return work


def start_reduce_scatter(chunk: Tensor, flat: Tensor, group: Group = None) -> dist.Work:
    """Begin to write this rank's chunk of the sum of all `flat`, shape (K c,), to `mine`: (c,)."""
    work: dist.Work = _REDUCE_SCATTER(chunk, flat, group=group, async_op=True)
    return work


# PyTorch 2.13 renamed these functions, and warns about the old names.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
