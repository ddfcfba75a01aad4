"""DDP in one page: the version that lecture 05 builds, as a wrapper around a module.

    >>> from course_lib.ddp import MinimalDDP
    >>> model = MinimalDDP(model)               # on every rank; rank 0's weights are taken
    >>> for x, y in loader:                     # each rank's own shard
    ...     optimizer.zero_grad()
    ...     loss_fn(model(x), y).backward()     # buckets are sent meanwhile
    ...     model.finish()                      # wait for the last ones
    ...     optimizer.step()

Backward computes the last layer's gradients first. A hook on every parameter puts its gradient into
a bucket, divided by K. A full bucket is summed over the ranks while backward goes on:

    backward    |  g₄  |  g₃  |  g₂  |  g₁  |
    network            |  all-reduce g₄ g₃ |  all-reduce g₂ g₁ | finish

The buckets and their hooks are those of `functions`; a class only adds equal weights at the start.
It is right for a module of which no buffer has to stay equal. `DistributedDataParallel` keeps
buffers equal, waits by itself, and says what is wrong where this class would hang or diverge.

S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from typing import Any

import torch.distributed as dist
from torch import nn

from course_lib.bucketing import MEGABYTE
from course_lib.collectives import Group
from course_lib.ddp.functions import data_parallel


class MinimalDDP(nn.Module):
    """Wrap `module` so that `.grad` is the mean over the ranks of `group` after `finish()`.

    All ranks must construct it. `bucket_cap_mb` is the size of a bucket in MiB, and
    `first_bucket_mb` that of the first one, which the network waits for.

    Attributes:
        module: the module that was wrapped.
        finish: waits until all gradients are averaged. Call it after each backward that averages.
        no_sync: gives a context. Gradients of backwards inside add up on each rank; the next
            backward outside averages the sum.

    """

    def __init__(
        self,
        module: nn.Module,
        bucket_cap_mb: float = 25,
        first_bucket_mb: float = 1,
        group: Group = None,
    ) -> None:
        super().__init__()
        self.module = module
        for param in module.parameters():  # replicas start equal
            dist.broadcast(param.data, group=group, group_src=0)
        caps = int(bucket_cap_mb * MEGABYTE), int(first_bucket_mb * MEGABYTE)
        self.finish, self.no_sync = data_parallel(module.parameters(), *caps, group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return self.module(*args, **kwargs)
