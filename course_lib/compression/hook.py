"""A comm hook that sends gradients compressed, during backward.

    >>> from course_lib.compression import CompressionState, ErrorFeedback, OneBit, compression_hook
    >>> from course_lib.ddp import DistributedDataParallel
    >>> model = DistributedDataParallel(model)  # or PyTorch's
    >>> model.register_comm_hook(CompressionState(ErrorFeedback(OneBit())), compression_hook)

Each bucket is summed by `compressed_all_reduce` and divided by K. PyTorch's DDP makes its buckets
again after the first step, in the order in which gradients became ready. The residuals of the old
buckets, which are from one step, are then dropped.

The exchange has two rounds, and the second depends on the first. The hook issues both, one bucket
after the other and in the same order on every rank. It does not issue the second round from the
future of the first: futures complete in different orders on different ranks, and ranks that issue
collectives in different orders deadlock. On a GPU nothing waits for the host. On a CPU backward
continues after the bucket has been exchanged.
"""

from collections.abc import Hashable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.collectives import Group
from course_lib.compression.all_reduce import compressed_all_reduce
from course_lib.compression.payload import Compressor
from course_lib.compression.power_sgd import PowerSGD


class CompressionState:
    """The state of `compression_hook`, with the same settings on all ranks.

    Args:
        compressor: this rank's compressor. `PowerSGD` compresses every matrix of a bucket by
            itself, and vectors are sent uncompressed.
        group: None for all ranks.

    """

    def __init__(self, compressor: Compressor, group: Group = None) -> None:
        self.compressor = compressor
        self.group = group
        self._keys: dict[int, Hashable] = {}

    def key(self, bucket: Any) -> Hashable:
        """Return a name for the bucket: equal on all ranks, and new if its contents changed."""
        index = bucket.index()
        key = (index, tuple(tuple(param.shape) for param in bucket.parameters()))
        if self._keys.setdefault(index, key) != key:
            self.compressor.forget(self._keys[index])
            self._keys[index] = key
        return key


def compression_hook(
    state: CompressionState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # PyTorch asks for this annotation
) -> torch.futures.Future[Tensor]:
    """Return a completed future of the bucket's mean over the ranks, computed with compression."""
    key = state.key(bucket)
    gradients = bucket.buffer()
    if isinstance(getattr(state.compressor, "compressor", state.compressor), PowerSGD):
        _matrix_by_matrix(state, bucket.gradients(), key)
    else:
        compressed_all_reduce(gradients, state.compressor, state.group, key)
    # A future made for a device also makes the streams of its users wait.
    device = [gradients.device] if gradients.is_cuda else None
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=device)
    future.set_result(gradients.div_(dist.get_world_size(state.group)))
    return future


def _matrix_by_matrix(state: CompressionState, gradients: list[Tensor], key: Hashable) -> None:
    vectors = [gradient for gradient in gradients if gradient.dim() < 2]
    if vectors:
        together = torch.cat([vector.reshape(-1) for vector in vectors])
        dist.all_reduce(together, group=state.group)
        pieces = torch.split(together, [vector.numel() for vector in vectors])
        for vector, summed in zip(vectors, pieces, strict=True):
            vector.copy_(summed.view_as(vector))
    for i, gradient in enumerate(gradients):
        if gradient.dim() >= 2:
            compressed_all_reduce(gradient, state.compressor, state.group, (key, i))
