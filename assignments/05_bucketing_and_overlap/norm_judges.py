"""Batch normalization over the rows of all ranks: inputs, program, judge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from course_lib.checking import Case, Given, equals
from course_lib.checking.judges import Oracle

OUTPUT, OF_X = "output of call {}", "gradient of x of call {}"
OF_WEIGHT, OF_BIAS = "gradient of weight", "gradient of bias"


def norm_inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Draw weight and bias, the same for all ranks, and for each call the rows of each rank.

    The case has ``rows``, the number of rows of each rank, and ``eps``. It may have ``channels``,
    ``places`` (the dimensions of x behind the channels), ``calls``, and ``mean`` and ``size``: the
    numbers of x are about ``mean`` ± ``size``. Every rank has another mean.
    """
    p = case.parameters
    channels, places = p.get("channels", 3), p.get("places", ())
    affine = [torch.randn(channels, generator=generator) for _ in range(2)]

    def randn(rows: int) -> Tensor:
        return torch.randn(rows, channels, *places, generator=generator)

    calls = range(p.get("calls", 1))
    return [
        {
            "weight and bias": affine,
            "eps": p["eps"],
            "x": [p.get("mean", 0) + p.get("size", 1) * (rank + randn(rows)) for _ in calls],
            "dy": [randn(rows) for _ in calls],
        }
        for rank, rows in enumerate(p["rows"])
    ]


def norm_program(sync_batch_norm: Callable[..., Any], mine: Any, given: Given) -> Any:
    """Do all forward passes, then all backward passes, the last one first."""
    weight, bias = (each.detach().requires_grad_() for each in mine["weight and bias"])
    xs = [x.detach().requires_grad_() for x in mine["x"]]
    ys = [sync_batch_norm(x, weight, bias, mine["eps"], group=given.group) for x in xs]
    for y in ys:
        if not isinstance(y, Tensor) or not y.requires_grad:
            what = "a tensor without history" if isinstance(y, Tensor) else type(y).__name__
            raise TypeError(f"sync_batch_norm returns {what}, expected one that backward() can use")
    for y, dy in zip(ys[::-1], mine["dy"][::-1], strict=True):
        y.backward(dy.to(y.dtype))
    return {
        OUTPUT: [y.detach() for y in ys],
        OF_X: [x.grad for x in xs],
        OF_WEIGHT: weight.grad,
        OF_BIAS: bias.grad,
    }


# The oracle is PyTorch's batch_norm of all rows, in float64. A mistake has other moments.

Standardise = Callable[[Sequence[Tensor], float], Sequence[Tensor]]
"""From the ranks' x, and eps, to each rank's x with mean 0 and variance 1."""


def of_all_rows(xs: Sequence[Tensor], eps: float) -> Sequence[Tensor]:
    """Return each rank's part of PyTorch's batch_norm of all rows."""
    return F.batch_norm(torch.cat(xs), None, None, training=True, eps=eps).split([*map(len, xs)])


def by(moments: Callable[[Sequence[Tensor], int], tuple[Tensor, Tensor]]) -> Standardise:
    """Standardise rank k's x by the mean and the variance ``moments(xs, k)``."""

    def standardise(xs: Sequence[Tensor], eps: float) -> Sequence[Tensor]:
        made = []
        for k, x in enumerate(xs):
            mean, variance = (along_channels(each, x) for each in moments(xs, k))
            made.append((x - mean) / (variance + eps).sqrt())
        return made

    return standardise


def along_channels(each: Tensor, x: Tensor) -> Tensor:
    """Return a vector of the channels in a shape that broadcasts over x."""
    return each.view(-1, *[1] * (x.dim() - 2))


def moments_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance of each channel."""
    numbers = x.transpose(0, 1).flatten(1)
    n = max(1, numbers.shape[1])
    mean = numbers.sum(1) / n
    return mean, (numbers - mean[:, None]).square().sum(1) / n


def averaged(xs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the plain means of the ranks' means and variances."""
    means, variances = zip(*map(moments_of, xs), strict=True)
    return torch.stack(means).mean(0), torch.stack(variances).mean(0)


def others_constant(xs: Sequence[Tensor], k: int) -> tuple[Tensor, Tensor]:
    """Return mean and variance of all rows, with the way back to rank k's rows only."""
    return moments_of(torch.cat([x if i == k else x.detach() for i, x in enumerate(xs)]))


def normed(standardise: Standardise) -> Oracle:
    """Return the oracle of outputs and gradients, for ranks' x that get mean 0 and variance 1."""

    def oracle(case: Case, inputs: Sequence[Any], me: int) -> Any:
        def leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
            return [each.to(torch.float64, copy=True).requires_grad_() for each in tensors]

        xs = [leaves(each["x"]) for each in inputs]
        affine = [leaves(each["weight and bias"]) for each in inputs]
        total, outputs = torch.zeros((), dtype=torch.float64), []
        for call in range(len(xs[me])):
            standard = standardise([each[call] for each in xs], inputs[me]["eps"])
            for k, each in enumerate(standard):
                weight, bias = affine[k]
                y = along_channels(weight, each) * each + along_channels(bias, each)
                total = total + (y * inputs[k]["dy"][call].double()).sum()
                outputs += [y.detach()] if k == me else []
        found = torch.autograd.grad(total, [*xs[me], *affine[me]])
        dtype = inputs[me]["x"][0].dtype
        *of_x, of_weight, of_bias = [each.to(dtype) for each in found]
        outputs = [each.to(dtype) for each in outputs]
        return {OUTPUT: outputs, OF_X: of_x, OF_WEIGHT: of_weight, OF_BIAS: of_bias}

    return oracle


NORM_MISTAKES: dict[str, Oracle] = {
    "batch_norm of this rank's own rows: mean and variance need the rows of all ranks": normed(
        by(lambda xs, k: moments_of(xs[k]))
    ),
    "the result with plain means of the ranks' means and variances: a rank counts with its rows, "
    "and ranks with different means add to the variance": normed(by(lambda xs, k: averaged(xs))),
    "the gradient if only this rank's loss counted: this x has changed the outputs of all ranks": (
        normed(by(others_constant))
    ),
}

right_norm = equals(normed(of_all_rows), NORM_MISTAKES)


# Expectations of the communication ------------------------------------------------------------


def norm_calls(case: Case, rank: int) -> int:
    """Return the number of collectives: one forward and one backward for each call."""
    return 2 * case.parameters.get("calls", 1)


def norm_channels(case: Case, rank: int) -> int:
    """Return the number of channels, in all calls together."""
    return case.parameters.get("calls", 1) * case.parameters.get("channels", 3)
