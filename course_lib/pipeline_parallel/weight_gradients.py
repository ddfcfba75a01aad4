"""Backward in two halves: the gradient of the input now, those of the weights later.

    >>> from course_lib.pipeline_parallel.weight_gradients import LaterWeightGradients
    >>> later = LaterWeightGradients()
    >>> with later:
    ...     loss = loss_fn(model(x), y)
    >>> loss.backward()  # what passes on to earlier layers
    >>> later.compute()  # the weights' gradients are there

A linear layer y = xWᵀ + b gets the gradient g of y, and computes two products from it:

    I:  gradient of x = gW            for the layer before, which waits for it
    W:  gradient of W = gᵀx           for the optimizer, at the end of the step

Both have the same size, 2·B·(inputs)·(outputs) operations each. Autograd computes both at once. A
zero-bubble pipeline computes the second one when it has nothing else to do, and keeps x and g until
then.

Operators other than `linear` have few or no weights, and are not divided: their whole backward is
in the first half. The same holds for a `linear` whose weight is itself computed, because backward
must continue from this weight.

P. Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class LaterWeightGradients(TorchFunctionMode):
    """While active, `linear` leaves the gradients of its weight and bias for `compute`.

    Backward may run after the mode has ended. It does not work with `torch.compile`, which ignores
    such modes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[Callable[[], None]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return self._linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        computed = any(param is not None and not param.is_leaf for param in (weight, bias))
        if computed or not weight.requires_grad or not torch.is_grad_enabled():
            return F.linear(input, weight, bias)
        # Autograd does not see the weights in a tuple, so it computes no gradients for them.
        anchor = input.new_zeros((), requires_grad=True)  # so that backward always runs here
        result: Tensor = _Linear.apply(input, anchor, (weight, bias), self._waiting)  # type: ignore[no-untyped-call]
        return result

    def compute(self) -> None:
        """Add the postponed gradients to `.grad`, in backward's order, and free their inputs."""
        while self._waiting:
            self._waiting.pop(0)()


class _Linear(torch.autograd.Function):
    """`F.linear`, whose backward computes gW and postpones gᵀx."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor,
        params: tuple[Tensor, Tensor | None],
        waiting: list[Callable[[], None]],
    ) -> Tensor:
        weight, bias = params
        ctx.save_for_backward(x, weight.detach())
        ctx.params, ctx.waiting = params, waiting
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, fixed = ctx.saved_tensors
        weight, bias = ctx.params

        def later() -> None:
            count = math.prod(g.shape[:-1])  # -1 would fail if a rank's share has no columns
            rows = g.reshape(count, g.shape[-1])
            # backward() of a leaf adds to its .grad, and calls its hooks.
            weight.backward(rows.T @ x.reshape(count, x.shape[-1]))
            if bias is not None and bias.requires_grad:
                bias.backward(rows.sum(0))

        ctx.waiting.append(later)
        return (g @ fixed if ctx.needs_input_grad[0] else None), None, None, None
