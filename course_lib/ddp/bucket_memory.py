"""Bucket memory: the memory for the gradients of all buckets, and how to reorder them.

All buckets of a dtype and device lie one after the other in one vector, which is allocated only
once. The order in which gradients become ready is known only after a backward. Then the buckets are
made again in this order, in the same memory. To put gradients in special memory, such as memory
that other ranks can access (`peer_memory`), pass the function that allocates the vector.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from course_lib.bucketing import Bucket, Kind, assign_buckets

ALIGNMENT = 32
"""A bucket begins at a multiple of this many elements: GPUs send aligned memory faster."""

Allocate = Callable[[int, torch.dtype, torch.device], Tensor]
"""`allocate(numel, dtype, device)`: a vector, not initialised."""


def allocate_empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a vector of ordinary memory."""
    return torch.empty(numel, dtype=dtype, device=device)


def allocate_memory(tensors: Sequence[Tensor], allocate: Allocate) -> dict[Kind, Tensor]:
    """Return for each dtype and device a vector with room for any buckets of the `tensors`."""
    lengths: dict[Kind, int] = {}
    for tensor in tensors:
        kind = (tensor.dtype, tensor.device)
        lengths[kind] = lengths.get(kind, 0) + tensor.numel() + ALIGNMENT
    return {kind: allocate(length, *kind) for kind, length in lengths.items()}


def lay_out(
    tensors: Sequence[Tensor], assignment: Sequence[Sequence[int]], memory: Mapping[Kind, Tensor]
) -> list[Bucket]:
    """Return the buckets of `assignment`, one after the other in `memory`.

    So buckets can be made again without twice the memory. The content of the old ones is then lost.
    """
    rest = dict(memory)
    buckets = []
    for indices in assignment:
        kind = (tensors[indices[0]].dtype, tensors[indices[0]].device)
        length = sum(tensors[i].numel() for i in indices)
        buckets.append(Bucket(tensors, indices, rest[kind][:length]))
        rest[kind] = rest[kind][-(-length // ALIGNMENT) * ALIGNMENT :]
    return buckets


class GradientBuckets:
    """The buckets of the gradients of `params`, in one memory.

    The other arguments and the errors are those of `assign_buckets`; `allocate` makes the memory.

    Attributes:
        order: indices of the parameters, in the order in which the buckets hold them.
        buckets: the buckets, in the order in which they are to be sent.
        place: index of a parameter → its bucket, and the view into it, of the parameter's shape.

    """

    def __init__(
        self,
        params: Sequence[Tensor],
        bucket_cap_mb: float | Sequence[float],
        first_bucket_mb: float,
        allocate: Allocate,
    ) -> None:
        self._params = params
        self._caps = (bucket_cap_mb, first_bucket_mb)
        self._memory = allocate_memory(params, allocate)
        self.use(range(len(params) - 1, -1, -1))

    def use(self, order: Sequence[int]) -> None:
        """Make the buckets again, for gradients that become ready in this order.

        The content of the old ones is lost.
        """
        self.order = list(order)
        assignment = assign_buckets(self._params, *self._caps, self.order)
        self.buckets = lay_out(self._params, assignment, self._memory)
        self.place = {
            index: (bucket, view)
            for bucket in self.buckets
            for index, view in zip(bucket.indices, bucket.views, strict=True)
        }

    def expect_all(self) -> None:
        """Mark all gradients of each bucket as still to come."""
        for bucket in self.buckets:
            bucket.pending = len(bucket.indices)
