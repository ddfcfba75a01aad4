"""The mean over tokens, clipped once: inputs, program, judge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from course_lib.checking import Case, Given, equals
from course_lib.checking.judges import Oracle
from course_lib.checking.shared.training import CLASSES, FEATURES, SHAPES, fill, make_model

UNLABELLED = -100
GRADIENT, LOSS = "gradient of parameter {}", "mean loss"


def token_inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Draw the same weights for all ranks, and different micro-batches for each.

    The case has ``tokens``: for each rank a list with a pair for each micro-batch, the number of
    its tokens and how many of them have a label. It may have ``size``, ``frozen`` (positions of
    parameters) and ``filled`` (whether every ``.grad`` has a value at the start). The tokens are
    multiplied by ``size``, and the first weight is divided by it. So the outputs do not depend on
    it, and the first weight's gradient does: with 0.1 nothing is clipped, and with 3 it is.
    """
    p = case.parameters
    size = p.get("size", 0.1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def labels(count: int, labelled: int) -> Tensor:
        y = torch.full((count,), UNLABELLED)
        places = torch.randperm(count, generator=generator)[:labelled]
        y[places] = torch.randint(CLASSES - 1, (labelled,), generator=generator)
        return y

    weights = [0.2 * randn(*shape) for shape in SHAPES]
    weights[0] *= 0.25 / size
    before = [randn(*shape) for shape in SHAPES] if p.get("filled") else None
    return [
        {
            "weights": weights,
            "before": before,
            "frozen": list(p.get("frozen", ())),
            "x": [size * (randn(count, FEATURES) + 0.5) for count, _ in mine],
            "y": [labels(*pair) for pair in mine],
        }
        for mine in p["tokens"]
    ]


def token_program(step: Callable[..., Any], mine: Any, given: Given) -> Any:
    """Call ``step(ddp, micro_batches, group=group)``; return the gradients and the loss."""
    model = given.model(make_model(mine["weights"], mine["frozen"]))
    ddp = DistributedDataParallel(model, process_group=given.group)
    ddp.train(model.training)
    fill(model, mine["before"])
    micro_batches = given.iterable(list(zip(mine["x"], mine["y"], strict=True)))
    loss = step(ddp, micro_batches, group=given.group)
    return {GRADIENT: [param.grad for param in model.parameters()], LOSS: loss}


def token_mean(per: str = "token", divisor: str = "1", clips: str = "the mean") -> Oracle:
    """Return the oracle of a step, right or with a mistake.

    Args:
        per: every ``token`` or ``rank`` counts the same.
        divisor: by what the mean is divided: ``1``, or ``K``, the number of ranks.
        clips: what is clipped: ``the mean``, or ``each rank``'s share before the mean.

    """

    def oracle(case: Case, inputs: Sequence[Any], me: int) -> Any:
        k = len(inputs)
        sums = [
            [_sums(mine, x, y) for x, y in zip(mine["x"], mine["y"], strict=True)]
            for mine in inputs
        ]
        total = sum(labels for theirs in sums for labels, _ in theirs)
        shares = []
        for theirs in sums:
            here = sum(labels for labels, _ in theirs)
            vectors = torch.stack([vector for _, vector in theirs])
            shares.append(vectors.sum(0) / (total if per == "token" else max(1, k * here)))
        if clips == "each rank":
            step = torch.stack([_clipped(k * share) for share in shares]).mean(0)
        else:
            step = _clipped(torch.stack(shares).sum(0) / (k if divisor == "K" else 1))
        weights = inputs[me]["weights"]
        gradients = step[:-1].to(weights[0].dtype).split([weight.numel() for weight in weights])
        kept = [
            None if i in inputs[me]["frozen"] else gradient.view_as(weight)
            for i, (gradient, weight) in enumerate(zip(gradients, weights, strict=True))
        ]
        return {GRADIENT: kept, LOSS: step[-1].item()}

    return oracle


def _sums(mine: Any, x: Tensor, y: Tensor) -> tuple[int, Tensor]:
    """Return a micro-batch's number of labels, and its sums in a vector: gradients, then loss."""
    model = make_model([weight.double() for weight in mine["weights"]], mine["frozen"])
    loss = F.cross_entropy(model(x.double()), y, reduction="sum")
    params = list(model.parameters())
    trained = [param for param in params if param.requires_grad]
    found = dict(zip(trained, torch.autograd.grad(loss, trained), strict=True))
    pieces = [found.get(param, torch.zeros_like(param)).flatten() for param in params]
    return int((y != UNLABELLED).sum()), torch.cat([*pieces, loss.detach().view(1)])


def _clipped(step: Tensor) -> Tensor:
    """Return the vector of gradients and loss, with the gradients clipped to norm 1."""
    return torch.cat([step[:-1] / max(1.0, float(step[:-1].norm())), step[-1:]])


TOKEN_MISTAKES: dict[str, Oracle] = {
    "a mean of the ranks' means: a label counts more on a rank that has few": token_mean("rank"),
    "the mean divided by the number of ranks: DDP divides by it once more": token_mean(divisor="K"),
    "the mean of gradients that each rank clipped before: clip once, after the mean": token_mean(
        clips="each rank"
    ),
}


def _of_no_labels(case: Case, inputs: Sequence[Any], me: int, value: Any) -> str:
    if value[LOSS] == value[LOSS]:
        return ""
    return "The mean of no labels is nan: add up losses, or leave out micro-batches without labels."


right_step = equals(
    token_mean(), TOKEN_MISTAKES, explain=_of_no_labels, tolerance={"float64": 1e-5}
)
