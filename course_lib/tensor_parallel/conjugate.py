"""Collectives that autograd can differentiate: each has a partner for backward.

                              forward                     backward
    f  copy_to_ranks          nothing                     all-reduce
    g  reduce_from_ranks      all-reduce                  nothing
    f̄  gather_from_sequence   all-gather, along tokens    reduce-scatter
    ḡ  scatter_to_sequence    reduce-scatter              all-gather

They come in pairs because backward is the transpose of forward. If every rank gets a copy of x, x₁
= … = x_K = x, the gradient of x is the sum of the ranks' gradients: dx = Σ dx_r. If y is a sum over
the ranks, y = Σ y_r, every rank gets the same gradient: dy_r = dy. In the same way, the transpose
of a gather is a reduce-scatter.

**Wrong:** `dist.all_reduce` inside forward. Autograd does not know about it, and computes gradients
as if each rank had computed the sum by itself. Without f, the layers below get only 1/K-th of the
terms of their gradient, different ones on each rank. There is no error, but the model trains badly.

f̄ and ḡ send as many bytes as f and g (an all-reduce *is* a reduce-scatter and an all-gather). But
between blocks each rank then holds 1/K of the tokens, so LayerNorm and dropout there need only 1/K
of the activations.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from course_lib.collectives import Group, library_all_reduce, place_in
from course_lib.gradient_sync import sync_flat
from course_lib.sharded_optimizer import start_all_gather, start_reduce_scatter
from course_lib.sharding import shard

Change = Callable[[Tensor], Tensor]


class _Conjugate(torch.autograd.Function):
    """Computes `there(x)`, and in backward `back(gradient)`, the transpose of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Change, back: Change) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


def _conjugate(x: Tensor, there: Change, back: Change) -> Tensor:
    result: Tensor = _Conjugate.apply(x, there, back)  # type: ignore[no-untyped-call]
    return result


def copy_to_ranks(x: Tensor, group: Group = None) -> Tensor:
    """Return `x`, which is equal on all ranks; backward sums the ranks' gradients (f)."""
    return _conjugate(x, lambda x: x.view_as(x), lambda grad: _summed(grad, group))


def reduce_from_ranks(x: Tensor, group: Group = None) -> Tensor:
    """Return the sum of the ranks' `x`, of one shape; backward keeps the gradient as it is (g)."""
    return _conjugate(x, lambda x: _summed(x, group), lambda grad: grad)


def gather_from_sequence(x: Tensor, length: int, group: Group = None) -> Tensor:
    """Return all `length` tokens, shape (length, …), from each rank's `shard` of them (f̄).

    `x` has the shape (tokens of this rank, …). Its gradient is this rank's part of the sum of the
    ranks' gradients.
    """
    return _conjugate(
        x, lambda x: _gathered(x, length, group), lambda grad: _reduced_part(grad, group)
    )


def scatter_to_sequence(x: Tensor, group: Group = None) -> Tensor:
    """Return this rank's `shard` of the tokens of the sum of the ranks' `x` (ḡ).

    `x` has the shape (tokens, …), the result (part, …). Backward gathers the gradient.
    """
    length = len(x)
    return _conjugate(
        x, lambda x: _reduced_part(x, group), lambda grad: _gathered(grad, length, group)
    )


def sum_partial_gradients(params: Iterable[Tensor], group: Group = None) -> None:
    """Sum the gradients of parameters that are equal on all ranks but saw 1/K of the tokens.

    With `sequence_parallel` these are the parameters of LayerNorms and the biases of
    `RowParallelLinear`. Call it on every rank before the optimizer's step, after the last backward
    or after each. One all-reduce sums all of them.
    """
    _, world_size = place_in(group)
    params = list(dict.fromkeys(param for param in params if param.requires_grad))
    for param in params:
        _divide_sum(param)
    sync_flat(params, group)  # the mean
    for param in params:
        assert param.grad is not None
        param.grad.mul_(world_size)
        node = torch.autograd.graph.get_gradient_edge(param).node
        reference = weakref.ref(param)
        hook = node.register_prehook(lambda _, reference=reference: _divide_sum(reference()))
        _SUMS[param] = world_size, node, hook


_SUMS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Parameter whose gradient is a sum → K, the node that will add to it next, and a hook there."""


def _divide_sum(param: Tensor | None) -> None:
    """Make an earlier sum the mean, if there is one: the ranks' equal K-ths, which add up to it."""
    if param is None or param not in _SUMS:
        return
    world_size, _, hook = _SUMS.pop(param)  # type: ignore[no-untyped-call]
    hook.remove()
    if param.grad is not None:
        param.grad.div_(world_size)


def _summed(x: Tensor, group: Group) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    library_all_reduce(total, group)
    return total


def _gathered(x: Tensor, length: int, group: Group) -> Tensor:
    """Return the tokens of all ranks. Parts are padded to one size, sent, and then cut again."""
    _, world_size = place_in(group)
    longest = -(-length // world_size)
    padded = x.new_zeros(longest, *x.shape[1:])
    padded[: len(x)] = x
    slots = padded.new_empty(world_size, *padded.shape)
    start_all_gather(slots.flatten(0, 1), padded, group).wait()
    sizes = [len(shard(range(length), world_size, r)) for r in range(world_size)]
    return torch.cat([slot[:size] for slot, size in zip(slots, sizes, strict=True)])


def _reduced_part(x: Tensor, group: Group) -> Tensor:
    """Return this rank's tokens of the sum over the ranks."""
    rank, world_size = place_in(group)
    longest = -(-len(x) // world_size)
    slots = x.new_zeros(world_size, longest, *x.shape[1:])
    for other, slot in enumerate(slots):
        part = shard(x, world_size, other)
        slot[: len(part)] = part
    own_slot = torch.empty_like(slots[0])
    start_reduce_scatter(own_slot, slots.flatten(0, 1), group).wait()
    return own_slot[: len(shard(x, world_size, rank))]
