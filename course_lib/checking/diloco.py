"""DiLoCo: inner steps on every rank, an outer step together; inputs, program, and what comes out.

The inner step of a case goes a quarter of the way ``to`` a goal of each rank's own, or ``along`` a
direction of its own, farther each time. So a round ends at other weights on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from course_lib.checking.cases import Case
from course_lib.checking.judges import Oracle, equals
from course_lib.checking.on_ranks.given import Given
from course_lib.ranks import compute

INNER_STEP = 10e-6
"""Seconds."""


def rounds_inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Draw equal weights for all ranks, of the case's ``shapes``, and other goals for each."""
    shapes, own = case.parameters["shapes"], dict(case.parameters)

    def draw() -> list[Tensor]:
        return [torch.randn(shape, generator=generator, dtype=torch.double) for shape in shapes]

    start = draw()
    return [{**own, "values": start, "goals": draw()} for _ in range(case.world_size)]


def rounds_program(diloco: Callable[..., Any], mine: Any, given: Given) -> dict[str, Any]:
    """Take the case's ``steps``; return the weights around every outer step."""
    params = [torch.nn.Parameter(value.clone()) for value in mine["values"]]
    memory, found, calls = [param.data_ptr() for param in params], [], []
    for param in params if mine["inner"] == "along" else ():
        # Of the last step: an inner optimizer has used it.
        param.grad = torch.ones(param.shape, dtype=param.dtype)
        if param.dim() > 1 and mine["momentum"]:
            param.grad = param.grad.mT.contiguous().mT
    grads = [param.grad for param in params]

    @torch.no_grad()
    def inner_step() -> None:
        calls.append("inner step")
        compute(INNER_STEP)
        for param, goal in zip(params, mine["goals"], strict=True):
            if mine["inner"] == "to":
                param.add_(0.25 * (goal - param))
            else:
                param.add_(len(calls) * goal / 8)

    options = [mine[key] for key in ("every", "outer_lr", "momentum")]
    # Other models, one before and one after it, which are not trained meanwhile.
    others = [[torch.nn.Parameter(torch.ones(size))] for size in (3, 4)]
    diloco(others[0], lambda: None, *options, group=given.group)
    step = diloco(given.iterable(params), inner_step, *options, group=given.group)
    diloco(others[1], lambda: None, *options, group=given.group)
    if not callable(step):
        raise TypeError(f"diloco returns {type(step).__name__}, expected a function")
    for n in range(mine["steps"]):
        step()
        if (n + 1) % mine["every"] in (0, 1):
            found.append([param.detach().clone() for param in params])
    same = (a.grad is b for a, b in zip(params, grads, strict=True))
    return {
        "after look {}, parameter {}": found,
        "inner steps": len(calls),
        "the parameters' own memory": [param.data_ptr() for param in params] == memory,
        "gradients are as they were": all(same) and all(g is None or g.eq(1).all() for g in grads),
    }


def rounds_computes(own: Any) -> dict[float, int]:
    """Return how long `rounds_program` computes: each of its steps has an inner one."""
    return {INNER_STEP: own["steps"]}


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.double().flatten() for tensor in tensors])


Outer = Callable[[Tensor, Tensor, float, Tensor], tuple[Tensor, Tensor, Tensor]]
"""`outer(held, change, momentum, m)`: from where to step, which step, and the next m."""


def _nesterov(
    held: Tensor, change: Tensor, momentum: float, m: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    m = momentum * m + change
    return held, change + momentum * m, m


def trained_by(
    outer: Outer = _nesterov,
    scale: Callable[[int], float] = lambda k: 1.0,
    after: float = 0,
    rate: float | None = None,
) -> Oracle:
    """Return the oracle of DiLoCo, or with another argument that of a mistake."""

    def oracle(case: Case, inputs: Sequence[Any], me: int) -> dict[str, Any]:
        own = inputs[me]
        shapes = [value.shape for value in own["values"]]
        w = torch.stack([_joined(each["values"]) for each in inputs])
        goals = torch.stack([_joined(each["goals"]) for each in inputs])
        held, m, found = w[0], torch.zeros_like(w[0]), []
        for n in range(1, own["steps"] + 1):
            w = w + 0.25 * (goals - w) if own["inner"] == "to" else w + n * goals / 8
            if n % own["every"] == after % own["every"]:
                change = scale(len(inputs)) * (held - w.mean(0))
                held, step, m = outer(held, change, own["momentum"], m)
                held = held - (own["outer_lr"] if rate is None else rate) * step
                w = held.expand_as(w)
            if n % own["every"] in (0, 1):
                ours = w[me].to(own["values"][0].dtype)
                pieces = torch.split(ours, [shape.numel() for shape in shapes])
                found.append([p.view(s) for p, s in zip(pieces, shapes, strict=True)])
        return {
            "inner steps": own["steps"],
            "after look {}, parameter {}": found,
            "the parameters' own memory": True,
            "gradients are as they were": True,
        }

    return oracle


equals_diloco = equals(
    trained_by(),
    {
        "the plain mean of the weights: take an outer step towards it": trained_by(
            lambda held, change, momentum, m: (held, change, m), rate=1.0
        ),
        "a step of Δ alone, or of m alone: Nesterov's looks ahead, Δ + μ m": trained_by(
            lambda held, change, momentum, m: (held, change, momentum * m + change)
        ),
        "an outer step away from the mean: Δ is old minus new, and is subtracted": trained_by(
            scale=lambda k: -1.0
        ),
        "the sum of the changes over the ranks, not their mean": trained_by(scale=float),
        "an outer learning rate of 1": trained_by(rate=1.0),
        "no outer step at all": trained_by(after=0.5),
    },
)
"""Judge the weights around every outer step, and that nothing else was touched."""
