"""Backward hooks: how autograd reports that a gradient is ready, and that backward is over.

- **A gradient is ready** when autograd has added it up in `param.grad`. It then calls a hook on the
  parameter (`register_post_accumulate_grad_hook`).
- **Backward is over** when autograd runs the callback that was queued during backward. One backward
  can run inside another: reentrant activation checkpointing computes a segment again and runs
  backward through it. This inner backward ends long before the outer one. So the callback is queued
  where the outermost backward begins: at the output of the model.

Hooks live as long as their parameters, and parameters live longer than their wrapper. So a hook has
only a weak reference to its wrapper, and is removed together with it.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


class Owner(Protocol):
    """An object that is notified of gradients."""

    hooked: "weakref.finalize[Any, Any]"

    def on_gradient(self, index: int) -> None:
        """Handle the gradient of parameter `index`, which is ready."""


class GradientHook:
    """Notifies its owner, if it still exists, that the gradient of a parameter is ready."""

    def __init__(self, owner: Owner, index: int) -> None:
        self.owner = weakref.ref(owner)
        self._index = index

    def __call__(self, param: Tensor) -> None:
        owner = self.owner()
        if owner is not None:
            owner.on_gradient(self._index)


def hook_gradients(owner: Owner, params: Sequence[Tensor]) -> "weakref.finalize[Any, Any]":
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

    It may call it more than once.
    """

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = weakref.WeakMethod(then)
        self._queued = False

    def watch(self, outputs: Any) -> None:
        """Request a call after the backward that will begin at one of the tensors in `outputs`."""
        for output in tensors_in(outputs):
            # On a leaf (a parameter, an input) the hook would outlive this graph.
            if output.grad_fn is not None:
                output.register_hook(lambda _: self._queue())  # type: ignore[no-untyped-call]

    def ask(self) -> None:
        """Request a call after the backward that is running, unless it is already requested."""
        if not self._queued:
            self._queue()

    def _queue(self) -> None:
        # Queue even if it was queued before: an exception drops queued callbacks silently.
        self._queued = True
        torch.autograd.Variable._execution_engine.queue_callback(self._over)

    def forget(self) -> None:
        """Forget an earlier request: an exception may have prevented its call."""
        self._queued = False

    def _over(self) -> None:
        self._queued = False
        then = self._then()
        if then is not None:
            then()
