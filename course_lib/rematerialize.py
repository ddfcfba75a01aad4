"""Rematerialisation: forget activations in forward, compute them again in backward.

    >>> from course_lib.rematerialize import rematerialize
    >>> result = rematerialize(model, x)  # keeps x only; backward runs the model once more
    >>> result.sum().backward()

Backward needs the results of every operation of forward, so autograd keeps them until then. With N
layers of a bytes each, these are N a bytes. With rematerialisation in segments of s layers, only
the input of each segment is kept, x bytes, and the s layers of a segment while it goes backward:

    memory   (N/s) x + s a          least at s = √(N x/a);  √N layers, if x = a
    time     one more forward: 4/3 of forward and backward, if backward takes twice as long

Weights and gradients can be divided over the ranks (`sharded_optimizer`, `fully_sharded`).
Activations are not divided, and for long sequences they fill the memory.

T. Chen, B. Xu, C. Zhang and C. Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016.
PyTorch's is `torch.utils.checkpoint`.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


def rematerialize(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Return `function(*inputs)`, a tensor, without keeping what it computes on the way.

    `function` is a module or a function of tensors and other values. Backward calls it again with
    the same inputs and the same random numbers (dropout). So it must not depend on anything that
    changes in between, and its side effects (BatchNorm's statistics) happen twice. Call
    `backward()`: `torch.autograd.grad` does not reach the function's parameters.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    # Autograd checks only these inputs for gradients, and the parameters are not among them.
    trained = torch.empty(0, requires_grad=True)
    result: Tensor = _Again.apply(function, trained, *inputs)  # type: ignore[no-untyped-call]
    return result


def most_kept(run: Callable[[], object], weights: Iterable[Tensor] = ()) -> int:
    """Return the most bytes that autograd keeps at any one time while `run` goes there and back.

    A piece of memory counts once, however many tensors lie in it, from the first time that autograd
    keeps one of them until it drops the last. The memory of `weights` does not count.
    """
    ignored = {weight.untyped_storage().data_ptr() for weight in weights}
    uses: Counter[tuple[int, int]] = Counter()  # of each memory, by its address and bytes
    peak = 0

    def keep(tensor: Tensor) -> _Kept:
        nonlocal peak
        stand_in, storage = _Kept(tensor), tensor.untyped_storage()
        memory = storage.data_ptr(), storage.nbytes()
        if memory[0] not in ignored:
            uses[memory] += 1
            weakref.finalize(stand_in, uses.subtract, [memory])
            peak = max(peak, sum(nbytes for (_, nbytes), count in uses.items() if count))
        return stand_in

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda stand_in: stand_in.tensor):
        run()
    return peak


class _Kept:
    """Stands for a tensor that autograd keeps, and dies when autograd drops it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


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
            # Leaves: this is a separate graph, which ends here.
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
