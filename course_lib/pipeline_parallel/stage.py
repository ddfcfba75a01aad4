"""One stage: the forward and the backward of some layers, for several micro-batches at once.

    >>> from course_lib.pipeline_parallel import split_layers
    >>> [len(stage) for stage in split_layers(model, 2)]
    [2, 1]

Autograd cannot follow a tensor to another rank. So a stage cuts the graph at both ends:

    x (from the stage before)  →  layers  →  y (to the stage after)
    gradient of x              ←  layers  ←  gradient of y

Forward makes x the start of a separate graph, and keeps x and y. Backward continues from y with the
gradient that arrived, and finds the gradient of x in ``x.grad``. All activations of the stage
between x and y are kept until then.

Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
NeurIPS 2019.
"""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from course_lib.pipeline_parallel.weight_gradients import LaterWeightGradients
from course_lib.sharding import shard_bounds


def split_layers(model: nn.Sequential, stages: int) -> list[nn.Module]:
    """Return `model` in parts, to be called one after the other; the layers are shared, not copied.

    `stages` is the number of parts, and `shard_bounds` cuts the layers. Names stay the same: layer
    5 of the model is also layer ``5`` of its stage. Raises ValueError if a stage would have no
    layer.
    """
    if len(model) < stages:
        raise ValueError(
            f"{len(model)} layers cannot be cut into {stages} stages: each must have one or more"
        )
    bounds = [shard_bounds(len(model), stages, stage) for stage in range(stages)]
    return [model[start:stop] for start, stop in bounds]


class Stage:
    """A module, and the activations of micro-batches between their forward and backward.

    With `in_halves`, `backward` leaves the gradients of weights to `backward_weights`.
    """

    def __init__(self, module: nn.Module, *, in_halves: bool) -> None:
        self.module = module
        self._in_halves = in_halves
        self._held: dict[int, tuple[Tensor, Tensor]] = {}
        self._later: dict[int, LaterWeightGradients] = {}

    def forward(
        self, micro_batch: int, x: Tensor, finish: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Return y, detached from the graph; `finish`, such as a loss, is applied to y if given.

        `x` must require a gradient if its gradient is needed.
        """
        later = LaterWeightGradients() if self._in_halves else None
        with later or nullcontext():
            y: Tensor = self.module(x)
        y = y if finish is None else finish(y)
        self._held[micro_batch] = x, y
        if later is not None:
            self._later[micro_batch] = later
        return y.detach()

    def backward(self, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        """Return the gradient of x from the gradient of y (`None` for a loss).

        It also adds the gradients of the weights to `.grad`, unless `in_halves`. The result is
        `None` if x requires no gradient, and zeros if y does not depend on x.
        """
        x, y = self._held.pop(micro_batch)
        if y.requires_grad:  # else every parameter up to here is frozen
            torch.autograd.backward(y, gradient)
        if not (x.is_leaf and x.requires_grad):
            return None
        return torch.zeros_like(x) if x.grad is None else x.grad

    def backward_weights(self, micro_batch: int) -> None:
        """Add the gradients of the weights that `backward` did not compute."""
        self._later.pop(micro_batch).compute()

    @property
    def activations(self) -> int:
        """The number of micro-batches whose activations are held."""
        return len(self._held.keys() | self._later.keys())
