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

It is right for a module whose parameters have one dtype and device, all get a gradient in every
step, and of which no buffer has to stay equal. `DistributedDataParallel` has no such conditions,
waits by itself, and says what is wrong where this class would hang or diverge.

S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from course_lib.bucketing import Bucket, assign_buckets
from course_lib.collectives import Group, place_in


class MinimalDDP(nn.Module):
    """Wrap `module` so that `.grad` is the mean over the ranks of `group` after `finish()`.

    All ranks must construct it. `bucket_cap_mb` is the size of a bucket in MiB, and
    `first_bucket_mb` that of the first one, which the network waits for.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_cap_mb: float = 25,
        first_bucket_mb: float = 1,
        group: Group = None,
    ) -> None:
        super().__init__()
        self.module, self._group = module, group
        _, self._world_size = place_in(group)
        for param in module.parameters():  # replicas start equal
            dist.broadcast(param.data, group=group, group_src=0)
        self._params = [param for param in module.parameters() if param.requires_grad]
        # From the last parameter to the first, as backward computes their gradients.
        buckets = assign_buckets(self._params, bucket_cap_mb, first_bucket_mb)
        self._buckets = [Bucket(self._params, indices) for indices in buckets]
        self._works: list[dist.Work | None] = []  # one for each bucket that was sent
        self._arrived: set[Tensor] = set()  # parameters with a gradient since the last finish()
        self._synchronise = True
        for bucket in self._buckets:
            for index, view in zip(bucket.indices, bucket.views, strict=True):
                self._hook_in(self._params[index], bucket, view)

    def _hook_in(self, param: Tensor, bucket: Bucket, view: Tensor) -> None:
        def on_gradient(param: Tensor) -> None:  # PyTorch passes the parameter, not its gradient
            if not self._synchronise:
                return
            if param in self._arrived:
                raise RuntimeError(
                    "a parameter got a second gradient before finish(): call finish() after each "
                    "backward(), or run all but the last one in no_sync()"
                )
            self._arrived.add(param)
            assert param.grad is not None
            view.copy_(param.grad).div_(self._world_size)
            param.grad = view  # the optimizer finds the mean there: nothing is copied back
            bucket.pending -= 1
            self._send_full_buckets()

        param.register_post_accumulate_grad_hook(on_gradient)  # type: ignore[no-untyped-call]

    def _send_full_buckets(self) -> None:
        """Send full buckets in one order, the same on all ranks: a bucket waits for those before.

        Ranks match collectives by their order alone. If full buckets were sent at once, two ranks
        whose gradients come in different orders would add up different buckets, without an error.
        """
        while len(self._works) < len(self._buckets) and not self._next.pending:
            buffer = self._next.buffer
            self._works.append(dist.all_reduce(buffer, group=self._group, async_op=True))

    @property
    def _next(self) -> Bucket:
        return self._buckets[len(self._works)]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return self.module(*args, **kwargs)

    def finish(self) -> None:
        """Wait until all gradients are averaged. Call it after each backward that averages.

        Raises RuntimeError if a parameter got no gradient, so that not all buckets are full.
        """
        if self._arrived and len(self._works) < len(self._buckets):
            raise RuntimeError(
                "backward() gave no gradient to a parameter, so a bucket is not full: use "
                "DistributedDataParallel(…, find_unused_parameters=True)"
            )
        for work in self._works:
            if work is not None:
                work.wait()
        self._works = []
        self._arrived.clear()
        for bucket in self._buckets:
            bucket.pending = len(bucket.indices)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients of backwards inside add up here; the next one outside averages the sum."""
        self._synchronise = False
        try:
            yield
        finally:
            self._synchronise = True
