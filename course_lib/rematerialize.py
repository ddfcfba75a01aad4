"""Rematerialisation: forget activations in forward, compute them again in backward.

    >>> from course_lib.rematerialize import rematerialize
    >>> result = rematerialize(model, x)  # keeps x only; backward runs the model once more
    >>> result.sum().backward()

Backward needs what every operation of forward has made, and keeps it until then: with N layers of a
bytes each, N a. Rematerialised in segments of s layers, what is kept is one input per segment, and,
while a segment goes backward, its s layers:

    memory   (N/s) x + s a          least at s = √(N x/a);  √N layers, if x = a
    time     one more forward: 4/3 of forward and backward, where backward is twice a forward

Weights and gradients (`sharded_optimizer`, `fully_sharded`) are divided by the ranks; activations
are not, and for long sequences they are what fills the memory.

T. Chen, B. Xu, C. Zhang and C. Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016.
PyTorch's is `torch.utils.checkpoint`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def rematerialize(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Return `function(*inputs)`, a tensor, without keeping what it computes on the way.

    `function` is a module or a function of tensors and other values. Backward calls it again with
    the same inputs and the same random numbers (dropout). So it must not depend on anything that
    changes in between, and its side effects (BatchNorm's statistics) happen twice. `backward()`
    only: `torch.autograd.grad` does not reach its parameters.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    # Autograd looks at the inputs alone to see if there is anything to do; parameters are not here.
    trained = torch.empty(0, requires_grad=True)
    result: Tensor = _Again.apply(function, trained, *inputs)  # type: ignore[no-untyped-call]
    return result


class _Again(torch.autograd.Function):
    """Runs a function without a graph, and in backward once more with one."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], trained: Tensor, *inputs: Any) -> Tensor:
        ctx.function = function
        ctx.others = [None if isinstance(value, Tensor) else value for value in inputs]
        ctx.places = [i for i, value in enumerate(inputs) if isinstance(value, Tensor)]
        ctx.save_for_backward(*(inputs[i] for i in ctx.places))
        ctx.devices = sorted({inputs[i].get_device() for i in ctx.places if inputs[i].is_cuda})
        ctx.random = torch.get_rng_state(), [torch.cuda.get_rng_state(d) for d in ctx.devices]
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = list(ctx.others)
        for place, saved in zip(ctx.places, ctx.saved_tensors, strict=True):
            # Leaves: this graph is one of its own, and ends here.
            inputs[place] = saved.detach().requires_grad_(saved.requires_grad)
        with torch.enable_grad(), torch.random.fork_rng(ctx.devices):
            cpu, gpus = ctx.random
            torch.set_rng_state(cpu)
            for device, state in zip(ctx.devices, gpus, strict=True):
                torch.cuda.set_rng_state(state, device)
            output = ctx.function(*inputs)
        if output.requires_grad:
            torch.autograd.backward(output, grad)
        grads = (value.grad if isinstance(value, Tensor) else None for value in inputs)
        return None, None, *grads
