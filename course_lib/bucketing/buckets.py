"""Buckets: the gradients that are sent together, and their order.

    >>> from course_lib.bucketing import assign_buckets
    >>> assign_buckets([torch.empty(1 << 18)] * 4, bucket_cap_mb=2, first_bucket_mb=1)  # 1 MiB each
    [[3], [2, 1], [0]]

One all-reduce per parameter pays the latency once per parameter: a deep network of small layers
spends most of a step on it. One all-reduce for all of them pays it once, but cannot begin before
the last gradient is there. Buckets lie between: gradients are put one after the other into flat
buffers of at most `bucket_cap_mb`. A buffer is sent as soon as it is complete, while backward
continues.

Backward computes gradients from the last layer to the first, so buckets are filled in the *reverse*
order of the parameters. The first one is small (`first_bucket_mb`): the network is idle until it is
complete. A buffer holds one dtype, on one device, because a collective sums numbers of one kind.

`size.best_bucket_bytes` computes the best size for a network; PyTorch's 25 MiB suits many.

S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

MEGABYTE = 1 << 20
"""Bytes of a megabyte in PyTorch's arguments: 2²⁰."""

Kind = tuple[torch.dtype, torch.device]
"""The kind of a tensor; one flat buffer holds tensors of one kind only."""


def assign_buckets(
    tensors: Sequence[Tensor],
    bucket_cap_mb: float | Sequence[float] = 25,
    first_bucket_mb: float = 1,
    order: Sequence[int] | None = None,
) -> list[list[int]]:
    """Return the buckets, lists of indices of `tensors`, in the order in which they are complete.

    The tensors are taken in `order` (default: from the last to the first). Each goes into the open
    bucket of its dtype and device; where it would make that larger than its cap, the bucket is
    closed and a new one opened. The first bucket of each kind has the cap `first_bucket_mb`, if
    that is smaller. So no bucket exceeds its cap, unless it holds a single tensor that does: cap 0
    gives each tensor its own. (PyTorch closes a bucket *after* the cap has been passed.) Several
    caps are those of the first bucket of each kind, the second and so on; the last is for all that
    follow.

    Every index of `order` occurs once, and within a bucket the order is kept. A bucket is complete
    when its last tensor is there; the buckets are sorted by that. Nothing is allocated: only the
    tensors' sizes, dtypes and devices count.

    Raises ValueError if a cap is negative, or there is none.
    """
    several = isinstance(bucket_cap_mb, Sequence)
    caps = list(bucket_cap_mb) if isinstance(bucket_cap_mb, Sequence) else [bucket_cap_mb]
    if not caps or min(*caps, first_bucket_mb) < 0:
        raise ValueError(
            f"bucket_cap_mb={bucket_cap_mb} and first_bucket_mb={first_bucket_mb} must be sizes "
            "in MiB, 0 or more"
        )
    if order is None:
        order = range(len(tensors) - 1, -1, -1)
    if not several:
        caps = [min(*caps, first_bucket_mb), *caps]
    # kind -> (bucket, its bytes, its number)
    still_open: dict[Kind, tuple[list[int], int, int]] = {}
    buckets: list[list[int]] = []
    for index in order:
        tensor = tensors[index]
        kind = (tensor.dtype, tensor.device)
        bucket, filled, number = still_open.get(kind, ([], 0, 0))
        if bucket and filled + tensor.nbytes > caps[min(number, len(caps) - 1)] * MEGABYTE:
            bucket, filled, number = [], 0, number + 1
        if not bucket:
            buckets.append(bucket)
        bucket.append(index)
        still_open[kind] = (bucket, filled + tensor.nbytes, number)
    when = {index: position for position, index in enumerate(order)}
    return sorted(buckets, key=lambda bucket: when[bucket[-1]])


def lay_out_like(tensor: Tensor, piece: Tensor) -> Tensor:
    """Return a view of `piece`, a vector of the length of `tensor`, in its shape and strides.

    A gradient must lie in memory as its parameter does (channels last, transposed): optimizers in
    one kernel go through both as they lie. If the tensor has gaps, the view is contiguous.
    """
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    without_gaps = 1
    for stride, size in sorted(dim for dim in dims if dim[1] > 1):
        if stride != without_gaps:
            return piece.view(tensor.shape)
        without_gaps *= size
    return piece.as_strided(tensor.shape, tensor.stride())


class Bucket:
    """The tensors of one bucket, and the flat buffer in which they lie one behind the other.

    Attributes:
        indices: which of the tensors it holds, in the order in which they lie in the buffer.
        buffer: shape (sum of their lengths,), of their dtype, on their device.
        views: for each of them the part of `buffer` that is its place, laid out like it.
        pending: how many of them are still to come.

    """

    def __init__(
        self, tensors: Sequence[Tensor], indices: Sequence[int], buffer: Tensor | None = None
    ) -> None:
        """Lay out `tensors[i]`, i in `indices`, all of one kind, in `buffer`; None allocates it."""
        members = [tensors[i] for i in indices]
        self.indices = list(indices)
        length = sum(member.numel() for member in members)
        self.buffer = members[0].new_empty(length) if buffer is None else buffer
        pieces = torch.split(self.buffer, [member.numel() for member in members])
        self.views = [lay_out_like(m, piece) for m, piece in zip(members, pieces, strict=True)]
        self.pending = len(self.indices)
