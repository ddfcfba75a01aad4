"""Hooks: how autograd reports gradients, and your own way to average a full bucket of them.

    >>> from course_lib.ddp import DistributedDataParallel, all_reduce_hook
    >>> model = DistributedDataParallel(model, comm_hook=all_reduce_hook)

**Hooks of autograd.**

- A gradient is ready when autograd has added it up in `param.grad`. It then calls a hook on the
  parameter (`register_post_accumulate_grad_hook`).
- Backward is over when autograd runs the callback that was queued during backward. One backward can
  run inside another: reentrant activation checkpointing computes a segment again and runs backward
  through it. This inner backward ends long before the outer one. So the callback is queued where
  the outermost backward begins: at the output of the model.

Hooks live as long as their parameters, and parameters live longer than their wrapper. So a hook has
only a weak reference to its wrapper, and is removed together with it.

**Comm hooks.** `DistributedDataParallel` calls `hook(state, bucket)` when a bucket is complete. The
hook starts to communicate and returns a future at once. The future's tensor becomes the averaged
gradients. Compression, gossip and local SGD can be written as hooks. The signature is PyTorch's. So
a hook runs with both classes, as do those in `torch.distributed.algorithms.ddp_comm_hooks`. With a
hook, the gradients in the bucket are *not* divided by K beforehand: a hook that sums must divide. A
hook must issue the same collectives on all ranks; buckets come in the same order on all.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from course_lib.bucketing import Bucket, lay_out_like


class GradientHook:
    """Notifies its owner, a `Reducer`, if it still exists, that a parameter's gradient is ready."""

    def __init__(self, owner: Any, index: int) -> None:
        self.owner = weakref.ref(owner)
        self._index = index

    def __call__(self, param: Tensor) -> None:
        owner = self.owner()
        if owner is not None:
            owner.on_gradient(self._index)


def hook_gradients(owner: Any, params: Sequence[Tensor]) -> "weakref.finalize[Any, Any]":
    """Notify `owner`, by index, of the gradients of `params`, instead of earlier owners.

    Returns a finalizer, which removes the hooks when it is called or when the owner is deleted. Its
    `alive` says whether the hooks still exist.
    """
    for param in params:
        hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
        for hook in list(hooks.values()):
            earlier = hook.owner() if isinstance(hook, GradientHook) else None
            if earlier is not None:
                earlier.hooked()
    handles = [
        param.register_post_accumulate_grad_hook(GradientHook(owner, index))  # type: ignore[no-untyped-call]
        for index, param in enumerate(params)
        if param.requires_grad
    ]
    finalizer = weakref.finalize(owner, _remove, handles)
    finalizer.atexit = False
    return finalizer


def _remove(handles: Sequence[torch.utils.hooks.RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def tensors_in(outputs: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples, dicts and dataclasses."""
    for leaf in tree_leaves(outputs):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from tensors_in([getattr(leaf, field.name) for field in fields(leaf)])


class EndOfBackward:
    """Calls the bound method `then`, if its object still exists, when a backward is over.

    A backward that fails is never over: autograd drops its callbacks.
    """

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = weakref.WeakMethod(then)
        self._callback: Callable[[], Any] = _nothing

    @property
    def requested(self) -> bool:
        """Whether this runs inside a backward after which there will be a call."""
        return self._callback() is not None and torch._C._current_graph_task_id() != -1

    def watch(self, outputs: Any) -> None:
        """Request a call after the backward that will begin at one of the tensors in `outputs`."""
        for output in tensors_in(outputs):
            # On a leaf (a parameter, an input) the hook would outlive this graph.
            if output.grad_fn is not None:
                output.register_hook(lambda _: self.ask())  # type: ignore[no-untyped-call]

    def ask(self) -> None:
        """Request a call after the backward that is running, unless it is already requested."""
        if not self.requested:
            callback = partial(self._over)  # only autograd keeps it, as long as this backward runs
            self._callback = weakref.ref(callback)
            torch.autograd.Variable._execution_engine.queue_callback(callback)

    def forget(self) -> None:
        """Forget an earlier request: an exception may have prevented its call."""
        self._callback = _nothing

    def _over(self) -> None:
        self.forget()
        then = self._then()
        if then is not None:
            then()


def _nothing() -> None:
    """Stand in for a reference to a callback that does not exist any more."""


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

    After this function, the bucket holds the result. The function raises ValueError if the number
    of elements in the hook's future is not the bucket's.
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
                f"a comm hook's future holds a tensor of size {reduced.numel()}, but the bucket "
                f"has size {gradients.numel()}: the future must hold the reduced bucket"
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
    return future.then(lambda reduced: first_tensor(reduced.value()))


def first_tensor(value: Any) -> Tensor:
    """Return the tensor in a future's value, which for a collective is a list with one tensor."""
    tensor: Tensor = value[0] if isinstance(value, list | tuple) else value
    return tensor
