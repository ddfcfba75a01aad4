"""Comm hooks: your own way to average a full bucket of gradients.

    >>> from course_lib.ddp import DistributedDataParallel, all_reduce_hook
    >>> model = DistributedDataParallel(model, comm_hook=all_reduce_hook)

`DistributedDataParallel` calls `hook(state, bucket)` when a bucket is complete. The hook starts to
communicate and returns a future at once. The future's tensor becomes the averaged gradients.
Compression, gossip and local SGD can be written as hooks. The signature is PyTorch's. So a hook
runs with both classes, as do the hooks in `torch.distributed.algorithms.ddp_comm_hooks`.

With a hook, the gradients in the bucket are *not* divided by K beforehand: a hook that sums must
divide. A hook must issue the same collectives on all ranks; buckets come in the same order on all.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.bucketing import Bucket, lay_out_like


class GradBucket:
    """A hook's view of a bucket: the interface of `torch.distributed.GradBucket`."""

    def __init__(self, index: int, bucket: Bucket, params: list[Tensor], is_last: bool) -> None:
        self._index = index
        self._params = params
        self._is_last = is_last
        self._buffer = bucket.buffer

    def index(self) -> int:
        """Return the bucket's number; bucket 0 is complete first."""
        return self._index

    def buffer(self) -> Tensor:
        """Return the gradients as one vector, shape (elements,), which may be overwritten."""
        return self._buffer

    def set_buffer(self, tensor: Tensor) -> None:
        """Replace the vector by another of the same length, for functions that the hook calls."""
        self._buffer = tensor

    def gradients(self) -> list[Tensor]:
        """Return the gradients one by one, as views into the vector in their parameters' shapes."""
        pieces = torch.split(self._buffer, [param.numel() for param in self._params])
        return [lay_out_like(param, p) for param, p in zip(self._params, pieces, strict=True)]

    def parameters(self) -> list[Tensor]:
        """Return the parameters, in the order of `gradients`."""
        return list(self._params)

    def is_last(self) -> bool:
        """Return whether this is the last bucket of the step."""
        return self._is_last


CommHook = Callable[[Any, Any], torch.futures.Future[Any]]
"""`hook(state, bucket)` → a future of a vector as long as `bucket.buffer()`."""


def launch(hook: tuple[Any, CommHook], bucket: GradBucket) -> Callable[[], None]:
    """Call the hook, a pair `(state, hook)`; return a function that waits for its result.

    After this function, the bucket holds the result. The function raises TypeError if the hook's
    future holds no tensor, and ValueError if the tensor's number of elements is not the bucket's.
    """
    state, call = hook
    gradients = bucket.buffer()  # before the hook can replace it
    future = call(state, bucket)
    if not hasattr(future, "wait"):
        raise TypeError(f"a comm hook must return a future of the reduced bucket, not {future!r}")

    def wait() -> None:
        reduced = first_tensor(future.wait()).detach()
        if reduced.numel() != gradients.numel():
            raise ValueError(
                f"a comm hook's future holds {reduced.numel()} numbers, but the bucket has "
                f"{gradients.numel()} gradients: the future must hold the reduced bucket"
            )
        if reduced.data_ptr() != gradients.data_ptr():
            gradients.copy_(reduced.reshape(-1))

    return wait


def all_reduce_hook(
    group: dist.ProcessGroup | None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # PyTorch asks for this annotation
) -> torch.futures.Future[Tensor]:
    """Average the bucket over `group` (None: all ranks), as without a hook.

    The hook's state is the group, as with PyTorch's own hooks.
    """
    buffer = bucket.buffer().div_(dist.get_world_size(group))
    work = dist.all_reduce(buffer, group=group, async_op=True)
    assert work is not None  # it is None only on ranks outside the group
    future: torch.futures.Future[Any] = work.get_future()
    return future.then(lambda done: first_tensor(done.value()))


def first_tensor(value: Any) -> Tensor:
    """Return the tensor in a future's value, which for a collective is a list with one tensor.

    Raises TypeError if there is no tensor.
    """
    tensor = value[0] if isinstance(value, list | tuple) else value
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"a comm hook's future must hold the reduced vector, a tensor, not {type(value)}"
        )
    return tensor
