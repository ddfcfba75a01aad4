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

of the same size, 2·B·(inputs)·(outputs) operations each. Autograd does both at once; a zero-bubble
pipeline does the second when it has nothing else to do. Until then x and g are held.

Other operators than `linear` have few weights, or none, and stay undivided: all of their backward
is in the first half. So is that of a weight that is itself computed, which has more behind it.

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

    Backward may come after it is left. Not for `torch.compile`, which sees no such mode.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[Callable[[], None]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return self._linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        computed = any(each is not None and not each.is_leaf for each in (weight, bias))
        if computed or not weight.requires_grad or not torch.is_grad_enabled():
            return F.linear(input, weight, bias)
        # In a tuple autograd does not see the weights, which then wait for no gradient from it.
        anchor = input.new_zeros(
            (), requires_grad=True
        )  # a gradient is asked for whatever else wants one
        result: Tensor = _Linear.apply(input, anchor, (weight, bias), self._waiting)  # type: ignore[no-untyped-call]
        return result

    def compute(self) -> None:
        """Add the gradients that backward left to `.grad`, in its order, and let go of them."""
        while self._waiting:
            self._waiting.pop(0)()


class _Linear(torch.autograd.Function):
    """`F.linear`, whose backward computes gW and notes gᵀx."""

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
            count = math.prod(g.shape[:-1])  # -1 would not do where a rank's share has no columns
            rows = g.reshape(count, g.shape[-1])
            # A leaf's backward adds to its .grad, and calls the hooks that wait for that.
            weight.backward(rows.T @ x.reshape(count, x.shape[-1]))
            if bias is not None and bias.requires_grad:
                bias.backward(rows.sum(0))

        ctx.waiting.append(later)
        return (g @ fixed if ctx.needs_input_grad[0] else None), None, None, None
