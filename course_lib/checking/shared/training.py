"""Inputs, program and judge of tasks that train on each rank's own rows.

The model is a small network of two layers. The judge trains it in one process on all rows. It also
knows the results of the mistakes that people make.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib.checking.answers import NAMED, Judge
from course_lib.checking.cases import Case
from course_lib.checking.judges import Oracle, equals
from course_lib.checking.on_ranks.given import Given
from course_lib.checking.shared.averaging import MISTAKES, Matrix, by_rows, mean, own

STEPS = 2
FEATURES, HIDDEN, CLASSES = 32, 16, 3
SHAPES = ((HIDDEN, FEATURES), (HIDDEN,), (CLASSES, HIDDEN), (CLASSES,))
"""Shapes of the model's parameters."""
NUMEL = sum(torch.Size(shape).numel() for shape in SHAPES)

UPDATE_MISTAKES: dict[str, Matrix] = {
    "the result if a shard of few rows counts as much as a shard of many rows": mean,
    "the sum of the shards' gradients, not the mean": MISTAKES[
        "the sum over the ranks, not the mean"
    ],
    "the sum over all rows: the division by B is missing": lambda rows: by_rows(rows) * rows.sum(),
    "a step with the right gradient, divided by the number of ranks a second time": (
        lambda rows: by_rows(rows) / len(rows)
    ),
    "a step that makes the loss larger: the sign is wrong": lambda rows: -by_rows(rows),
    "a step with this rank's own gradient: average before the update": own,
    "a step with this rank's own share of the gradient: average before the update": (
        lambda rows: own(rows) * by_rows(rows)
    ),
    "a step with this rank's own gradient divided by the number of ranks: the sum did not arrive": (
        lambda rows: own(rows) / len(rows)
    ),
    "the weights before the steps: the model was not updated": lambda rows: 0 * own(rows),
}

LOSS_MISTAKES: dict[str, Matrix] = {
    "the loss on this rank's own rows: average the loss, too": own,
    "this rank's share of the loss: add up the shares of all ranks": lambda rows: (
        own(rows) * by_rows(rows)
    ),
    "the plain mean of the ranks' losses: weight each loss by its number of rows": mean,
    "the sum of the ranks' losses, not their mean": lambda rows: len(rows) * mean(rows),
    "the sum of the losses of all rows: divide it by B": lambda rows: by_rows(rows) * rows.sum(),
}


LABELS = ("cross_entropy", "nll_loss", "multi_margin_loss")
"""Losses whose targets are labels. The targets of other losses have one number per output."""


def loss_of(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss of this name as a task promises it: a mean, without options."""

    def loss_fn(input: Tensor, target: Tensor) -> Tensor:
        value: Tensor = getattr(F, name)(input, target)
        return value

    loss_fn.__qualname__ = name  # tests distinguish functions by this name
    return loss_fn


def targets_of(loss: str, scores: Tensor) -> Tensor:
    """Return targets for the loss of this name, made from one number per row and output."""
    return scores.argmax(1) if loss in LABELS else scores


def mean_loss(model: nn.Module, loss: str, x: Tensor, y: Tensor) -> Tensor:
    """Return the loss of a float64 model, in float64 for rows of any dtype."""
    return loss_of(loss)(model(x.double()), y.double() if y.is_floating_point() else y)


def make_model(weights: Sequence[Tensor]) -> nn.Module:
    """Return the network with copies of these weights, without drawing random numbers."""
    first = nn.Linear(FEATURES, HIDDEN, device="meta")
    last = nn.Linear(HIDDEN, CLASSES, device="meta")
    first.weight, first.bias, last.weight, last.bias = (nn.Parameter(w.clone()) for w in weights)
    return nn.Sequential(first, nn.Tanh(), last)


def step_inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Draw the same weights for every rank, and different rows, for two steps.

    The case has ``rows``, the number of rows of each rank; in the second step, each rank has one
    row more. It may have ``lr`` (default 0.5), ``loss``, the name of a function of
    ``torch.nn.functional``, and ``filled``: whether every ``.grad`` holds numbers before the first
    step, the same on all ranks.
    """

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def targets(rows: int) -> Tensor:
        return targets_of(loss, randn(rows, CLASSES))

    weights = [0.3 * randn(*shape) for shape in SHAPES]
    loss = case.parameters.get("loss", "cross_entropy")
    before = [randn(*shape) for shape in SHAPES] if case.parameters.get("filled") else None
    return [
        {
            "before": before,
            "lr": case.parameters.get("lr", 0.5),
            "loss": loss,
            "weights": weights,
            "x": [randn(rows + step, FEATURES) for step in range(STEPS)],
            "y": [targets(rows + step) for step in range(STEPS)],
        }
        for rows in case.parameters["rows"]
    ]


def step_program(step: Callable[..., Any], mine: Any, given: Given) -> Any:
    """Call ``step(model, loss_fn, x, y, lr, group=group)`` twice; return weights and losses."""
    model, loss_fn = given.model(make_model(mine["weights"])), loss_of(mine["loss"])
    fill(model, mine["before"])
    losses = [
        step(model, loss_fn, x, y, mine["lr"], group=given.group)
        for x, y in zip(mine["x"], mine["y"], strict=True)
    ]
    weights = [param.detach() for param in model.parameters()]
    return {"parameter {} after two steps": weights, "loss returned by step {}": losses}


def fill(model: nn.Module, gradients: Sequence[Tensor] | None) -> None:
    """Put copies of these gradients into ``.grad`` of parameters that are not frozen.

    If `gradients` is None, leave ``.grad`` as it is.
    """
    for param, gradient in zip(model.parameters(), gradients or (), strict=gradients is not None):
        param.grad = gradient.clone() if param.requires_grad else None


def equals_sgd(*keys: str, **options: Any) -> Judge:
    """Return a judge that compares with plain SGD of one process on the rows of all members.

    The judge looks at the values that `step_program` returns.

    Args:
        *keys: first words of the keys of these values: ``parameter``, ``loss``.
        **options: options of `equals`.

    """

    def steps(
        update: Matrix = by_rows,
        loss: Matrix = by_rows,
        carry: float = 0,
        at_first: float = 0,
        kept: str = "",
    ) -> Oracle:
        known: list[tuple[Sequence[Any], list[dict[str, Any]]]] = []

        def oracle(case: Case, inputs: Sequence[Any], me: int) -> Any:
            if not known or known[0][0] is not inputs:
                known[:] = [(inputs, _steps(inputs, update, loss, carry, at_first, kept))]
            return those(known[0][1][me], keys)

        return oracle

    mistakes = {name: steps(matrix) for name, matrix in UPDATE_MISTAKES.items()}
    mistakes |= {name: steps(loss=matrix) for name, matrix in LOSS_MISTAKES.items()}
    for kept in ("B", "B_k/B"):
        name = f"a second step with the {kept} of the first step: count the rows anew in every call"
        mistakes[name] = steps(kept=kept)
    # The old gradient in .grad counts once if the ranks average it, or once per rank if they sum.
    for times in (1, 2, 3, 4):
        name = "a step that still contains the previous step's gradient: zero_grad is missing"
        mistakes[name + " " * (times - 1)] = steps(carry=times, at_first=times)
        name = "a step that contains .grad from before the first step: clear .grad before backward"
        mistakes[name + " " * (times - 1)] = steps(at_first=times)
    return looking_at(keys, equals(steps(), mistakes, **options))


def looking_at(keys: Sequence[str], judge: Judge) -> Judge:
    """Return the judge, restricted to the values whose keys begin with one of `keys`."""

    def judge_some(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
        judge(case, inputs, [those(value, keys) for value in values])

    return Judge(judge_some, NAMED, judge.refutes)


def those(value: Any, keys: Sequence[str]) -> Any:
    """Return the items whose keys begin with one of `keys`."""
    return {key: item for key, item in value.items() if key.startswith(tuple(keys))}


def _steps(
    inputs: Sequence[Mapping[str, Any]],
    update: Matrix,
    loss: Matrix,
    carry: float,
    at_first: float,
    kept: str,
) -> list[dict[str, Any]]:
    """Return the results of each member k if its step is ``w -= lr * sum_j update[k, j] g_j``.

    g_j is the gradient of member j on its rows, at its own weights. The sum also contains `carry`
    times the sum of the last step. In the first step, it contains `at_first` times the old content
    of ``.grad``. `kept` is what later steps reuse from the rows of the first step: ``B``, ``B_k/B``
    or nothing.
    """
    models = [make_model([w.double() for w in each["weights"]]) for each in inputs]
    last: list[list[Any]] = [
        [0.0 if before is None else before.double() for before in each["before"] or [None] * 4]
        for each in inputs
    ]
    mixed_losses, first = [], torch.ones(len(inputs), dtype=torch.float64)
    for step in range(STEPS):
        rows = torch.tensor([len(each["x"][step]) for each in inputs], dtype=torch.float64)
        first = rows if step == 0 else first
        weights = update(first if kept == "B_k/B" else rows)
        weights = weights * (rows.sum() / first.sum()) if kept == "B" else weights
        own_losses, grads = [], []
        for model, each in zip(models, inputs, strict=True):
            own_loss = mean_loss(model, each["loss"], each["x"][step], each["y"][step])
            own_losses.append(own_loss.item())
            grads.append(torch.autograd.grad(own_loss, list(model.parameters())))
        for k, model in enumerate(models):
            for i, param in enumerate(model.parameters()):
                mixture = sum(m * g[i] for m, g in zip(weights[k], grads, strict=True))
                last[k][i] = mixture + (carry if step else at_first) * last[k][i]
                param.data -= inputs[k]["lr"] * last[k][i]
        mixed_losses.append(loss(rows) @ torch.tensor(own_losses, dtype=torch.float64))
    dtype = inputs[0]["weights"][0].dtype
    return [
        {
            "parameter {} after two steps": [p.detach().to(dtype) for p in model.parameters()],
            "loss returned by step {}": [losses[k].item() for losses in mixed_losses],
        }
        for k, model in enumerate(models)
    ]
