"""Buckets: groups of gradients that are sent together, and their order.

    >>> from course_lib.bucketing import assign_buckets
    >>> assign_buckets([torch.empty(1 << 18)] * 4, bucket_cap_mb=2, first_bucket_mb=1)  # 1 MiB each
    [[3], [2, 1], [0]]

One all-reduce per parameter pays the latency once per parameter: a deep network of small layers
spends most of a step on it. One all-reduce for all parameters pays the latency once, but cannot
begin before the last gradient is ready. Buckets are a compromise: gradients are put one after the
other into flat buffers of at most `bucket_cap_mb`. A buffer is sent as soon as it is complete,
while backward continues.

Backward computes gradients from the last layer to the first, so buckets are filled in the *reverse*
order of the parameters. The first one is small (`first_bucket_mb`): the network is idle until it is
complete. A buffer has one dtype and one device, because a collective sums numbers of one kind.

`size.best_bucket_bytes` computes the best size for a network; PyTorch's 25 MiB suits many.

S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

MEGABYTE = 1 << 20
"""The bytes of one megabyte in PyTorch's arguments: 2²⁰."""

Kind = tuple[torch.dtype, torch.device]
"""The kind of a tensor; one flat buffer holds tensors of one kind only."""


def assign_buckets(
    tensors: Sequence[Tensor],
    bucket_cap_mb: float = 25,
    first_bucket_mb: float = 1,
    order: Sequence[int] | None = None,
) -> list[list[int]]:
    """Return the buckets, lists of indices of `tensors`, in the order in which they are complete.

    The tensors are assigned in `order` (default: from the last to the first). Each goes into the
    open bucket of its dtype and device. If the bucket would then exceed its cap, it is closed, and
    the tensor goes into a new one. The first bucket of each kind has the cap `first_bucket_mb`, if
    that is smaller. So a bucket exceeds its cap only if it holds a single, larger tensor: cap 0
    gives each tensor its own bucket. (PyTorch closes a bucket *after* it exceeds the cap.)

    Every index of `order` occurs once, and within a bucket the order is kept. A bucket is complete
    when its last tensor is ready, and the buckets are sorted by that time. Nothing is allocated:
    only the tensors' sizes, dtypes and devices count.

    Raises ValueError if a cap is negative.
    """
    if min(bucket_cap_mb, first_bucket_mb) < 0:
        raise ValueError(
            f"bucket_cap_mb={bucket_cap_mb} and first_bucket_mb={first_bucket_mb} must be sizes "
            "in MiB, 0 or more"
        )
    if order is None:
        order = range(len(tensors) - 1, -1, -1)
    first_cap = min(bucket_cap_mb, first_bucket_mb) * MEGABYTE
    # kind -> (bucket, its bytes, its cap in bytes)
    still_open: dict[Kind, tuple[list[int], int, float]] = {}
    buckets: list[list[int]] = []
    for index in order:
        tensor = tensors[index]
        kind = (tensor.dtype, tensor.device)
        bucket, filled, cap = still_open.get(kind, ([], 0, first_cap))
        if bucket and filled + tensor.nbytes > cap:
            bucket, filled, cap = [], 0, bucket_cap_mb * MEGABYTE
        if not bucket:
            buckets.append(bucket)
        bucket.append(index)
        still_open[kind] = (bucket, filled + tensor.nbytes, cap)
    positions = {index: position for position, index in enumerate(order)}
    return sorted(buckets, key=lambda bucket: positions[bucket[-1]])


def trained_buckets(params: Iterable[Tensor], cap: int, first_cap: int) -> list[list[int]]:
    """Return the buckets of a model's parameters, as positions in `params`; caps are in bytes.

    As `assign_buckets`, from the last parameter to the first. A frozen one is in no bucket. A tied
    one, the same tensor at several positions, is in one bucket, at its first position: its gradient
    is complete when the earliest layer has added to it.
    """
    tensors, first = list(params), dict[Tensor, int]()
    for position, param in enumerate(tensors):
        first.setdefault(param, position)
    order = [position for param, position in reversed(first.items()) if param.requires_grad]
    return assign_buckets(tensors, cap / MEGABYTE, first_cap / MEGABYTE, order)


def lay_out_like(tensor: Tensor, piece: Tensor) -> Tensor:
    """Return a view of `piece`, a vector as long as `tensor`, with the tensor's shape and strides.

    A gradient must have the memory layout of its parameter (channels last, transposed), because
    optimizers in one kernel go through both in memory order. If the tensor has gaps, the view is
    contiguous.
    """
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    without_gaps = 1
    for stride, size in sorted(dim for dim in dims if dim[1] > 1):
        if stride != without_gaps:
            return piece.view(tensor.shape)
        without_gaps *= size
    return piece.as_strided(tensor.shape, tensor.stride())


class Bucket:
    """The tensors of one bucket, and the flat buffer that holds them one after the other.

    Attributes:
        indices: the indices of its tensors, in the order in which the buffer holds them.
        buffer: a vector as long as all its tensors together, of their dtype, on their device.
        views: for each tensor, the view of its part of `buffer`, laid out like the tensor.
        pending: how many of its tensors are not in the buffer yet.

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
