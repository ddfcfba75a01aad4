"""DDP in three functions, without a module around the model: assignment 05 writes them.

    >>> from course_lib.ddp.functions import data_parallel
    >>> finish, no_sync = data_parallel(model.parameters(), cap=25 << 20, first_cap=1 << 20)
    >>> with no_sync():
    ...     loss_fn(model(x[:8]), y[:8]).backward()  # adds to .grad, sends nothing
    >>> loss_fn(model(x[8:]), y[8:]).backward()      # sends the sums, bucket by bucket
    >>> finish()                                     # .grad is the mean over the ranks

Each function uses the one before: a bucket on its way, buckets that leave by themselves, and a
model cut into buckets. `minimal` wraps a module with them. They allow parameters that a backward
does not use, dtypes that differ, and `no_sync` blocks that are nested.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch.distributed as dist
from torch import Tensor

from course_lib.bucketing import Bucket, trained_buckets
from course_lib.collectives import Group, place_in
from course_lib.gradient_sync import copy_scaled

Finish = Callable[[], None]


def send_bucket(params: Iterable[Tensor], group: Group = None) -> Finish:
    """Start to average the gradients of `params`, all of one dtype; return what finishes it.

    The gradients g_k of rank k travel in one flat tensor. `finish()` waits for it, and puts the
    mean 1/K Σ_k g_k into every ``.grad``. A ``.grad`` that is None counts as zeros.
    """
    members = list(params)
    bucket, (_, world_size) = Bucket(members, range(len(members))), place_in(group)
    for param, view in zip(members, bucket.views, strict=True):
        copy_scaled(None if param.grad is None else param.grad.detach(), 1 / world_size, view)
    work = dist.all_reduce(bucket.buffer, group=group, async_op=True)

    def finish() -> None:
        assert work is not None
        work.wait()
        for param, view in zip(members, bucket.views, strict=True):
            param.grad = view

    return finish


def hook_buckets(
    buckets: Sequence[Sequence[Tensor]],
    group: Group = None,
    sends: Callable[[], bool] = lambda: True,
) -> Finish:
    """Send each bucket during backward, when its gradients are there; return what ends a step.

    Buckets leave in the order of the list, the same on all ranks, so a complete one waits for
    those before it. `finish()` sends those that are left, and waits for all. A backward for which
    `sends()` is False only adds to ``.grad``.

    Raises RuntimeError if a parameter gets a second gradient before `finish()`: its bucket may have
    left without it.
    """
    waiting = {param for bucket in buckets for param in bucket}
    under_way: list[Finish] = []

    def on_gradient(param: Tensor) -> None:
        if sends():
            if param not in waiting:
                raise RuntimeError(
                    "a parameter got a second gradient before finish(): call finish() after each "
                    "backward(), or run all but the last one in no_sync()"
                )
            waiting.remove(param)
            while len(under_way) < len(buckets) and waiting.isdisjoint(buckets[len(under_way)]):
                under_way.append(send_bucket(buckets[len(under_way)], group))

    def finish() -> None:
        under_way.extend(send_bucket(bucket, group) for bucket in buckets[len(under_way) :])
        for finish_bucket in under_way:
            finish_bucket()
        under_way.clear()
        waiting.update(param for bucket in buckets for param in bucket)

    for param in waiting:
        param.register_post_accumulate_grad_hook(on_gradient)  # type: ignore[no-untyped-call]
    return finish


def data_parallel(
    params: Iterable[Tensor], cap: int, first_cap: int, group: Group = None
) -> tuple[Finish, Callable[[], AbstractContextManager[None]]]:
    """Average gradients during backward, in buckets of `cap` bytes; return (finish, no_sync).

    `trained_buckets` makes the buckets. Inside ``with no_sync():`` backward only adds to ``.grad``;
    the next backward outside all such blocks sends the sums.
    """
    parameters = list(params)
    buckets = [[parameters[i] for i in b] for b in trained_buckets(parameters, cap, first_cap)]
    blocks = 0  # no_sync blocks that are open

    @contextmanager
    def no_sync() -> Iterator[None]:
        nonlocal blocks
        blocks += 1
        try:
            yield
        finally:
            blocks -= 1

    return hook_buckets(buckets, group, sends=lambda: blocks == 0), no_sync
