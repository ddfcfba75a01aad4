"""Bucket memory: the place of the gradients of all buckets, and a new order for them.

All buckets of a dtype and device lie one behind the other in one vector, which is made only once.
The order in which gradients become ready is known only after a backward. Then the buckets are made
again in this order, in the same memory. To put gradients in a special place, such as memory that
other ranks can see (`peer_memory`), pass the function that allocates that vector.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from course_lib.bucketing import Bucket, Kind, assign_buckets

ALIGNMENT = 32
"""Elements to a multiple of which a bucket begins: GPUs send aligned memory faster."""

Allocate = Callable[[int, torch.dtype, torch.device], Tensor]
"""`allocate(numel, dtype, device)`: a vector, not initialised."""


def allocate_empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a vector of ordinary memory."""
    return torch.empty(numel, dtype=dtype, device=device)


def allocate_memory(tensors: Sequence[Tensor], allocate: Allocate) -> dict[Kind, Tensor]:
    """Return for each dtype and device a vector in which any buckets of the `tensors` have room."""
    lengths: dict[Kind, int] = {}
    for tensor in tensors:
        kind = (tensor.dtype, tensor.device)
        lengths[kind] = lengths.get(kind, 0) + tensor.numel() + ALIGNMENT
    return {kind: allocate(length, *kind) for kind, length in lengths.items()}


def lay_out(
    tensors: Sequence[Tensor], assignment: Sequence[Sequence[int]], memory: Mapping[Kind, Tensor]
) -> list[Bucket]:
    """Return the buckets of `assignment`, one behind the other in `memory`.

    So buckets can be made anew without twice the memory; what was in the old ones is then lost.
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
    """The buckets of the gradients of `params`, over one memory.

    Args and errors as of `assign_buckets`; `allocate` makes the memory.

    Attributes:
        order: indices of the parameters, as the buckets hold them one behind the other.
        buckets: in the order in which they are to leave.
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
        """Make the buckets anew, for gradients that become ready in this order.

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
        """Count the gradients of each bucket as still to come."""
        for bucket in self.buckets:
            bucket.pending = len(bucket.indices)
