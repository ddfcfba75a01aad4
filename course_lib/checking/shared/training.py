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
    "a step with this rank's own gradient: average before the update": own,
}

LOSS_MISTAKES: dict[str, Matrix] = {
    "the loss on this rank's own rows: average the loss, too": own,
    "the plain mean of the ranks' losses: weight each loss by its number of rows": mean,
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


def make_model(weights: Sequence[Tensor], frozen: Sequence[int] = ()) -> nn.Module:
    """Return the network with copies of these weights, without drawing random numbers.

    Parameters at the positions `frozen` do not require a gradient.
    """
    params = (nn.Parameter(w.clone(), i not in frozen) for i, w in enumerate(weights))
    first = nn.Linear(FEATURES, HIDDEN, device="meta")
    last = nn.Linear(HIDDEN, CLASSES, device="meta")
    first.weight, first.bias, last.weight, last.bias = params
    return nn.Sequential(first, nn.Tanh(), last)


def step_inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Draw the same weights for every rank, and different rows, for two steps.

    The case has ``rows``, the number of rows of each rank; in the second step, each rank has one
    row more, and the learning rate is smaller. It may have ``lr`` of the first step (default 0.5),
    ``loss``, the name of a function of ``torch.nn.functional``, and ``filled``: whether every
    ``.grad`` holds numbers before the first step, the same on all ranks. ``large`` is a factor of
    the targets, ``zero`` a rank whose rows are zero, and with ``norm`` the model has a BatchNorm.
    """
    p = case.parameters

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def targets(rows: int) -> Tensor:
        return targets_of(loss, p.get("large", 1) * randn(rows, CLASSES))

    weights = [0.3 * randn(*shape) for shape in SHAPES]
    loss, lr = p.get("loss", "cross_entropy"), p.get("lr", 0.5)
    before = [randn(*shape) for shape in SHAPES] if p.get("filled") else None
    return [
        {
            "before": before,
            "lr": [lr, 0.7 * lr],
            "loss": loss,
            "norm": p.get("norm", False),
            "weights": weights,
            "x": [randn(rows + step, FEATURES) * (rank != p.get("zero")) for step in range(STEPS)],
            "y": [targets(rows + step) for step in range(STEPS)],
        }
        for rank, rows in enumerate(p["rows"])
    ]


def step_program(step: Callable[..., Any], mine: Any, given: Given) -> Any:
    """Call ``step(model, loss_fn, x, y, lr, group=group)`` twice; return weights and losses."""
    model = given.model(_model_of(mine, mine["weights"]))
    loss_fn = loss_of(mine["loss"])
    fill(model, mine["before"])
    losses = [
        step(model, loss_fn, x, y, lr, group=given.group)
        for x, y, lr in zip(mine["x"], mine["y"], mine["lr"], strict=True)
    ]
    weights = [param.detach() for param in model.parameters()]
    return {
        "parameter {} after two steps": weights,
        "buffer {} after two steps": [buffer.clone() for buffer in model.buffers()],
        "loss returned by step {}": losses,
    }


def _model_of(mine: Any, weights: Sequence[Tensor]) -> nn.Module:
    model = make_model(weights)
    assert isinstance(model, nn.Sequential)
    if mine["norm"]:  # it has no parameters of its own, and its running means count every forward
        model[1] = nn.BatchNorm1d(HIDDEN, affine=False, dtype=weights[0].dtype)
    return model


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
        carry: Callable[[int], float] = lambda k: 0,
    ) -> Oracle:
        known: list[tuple[Sequence[Any], list[dict[str, Any]]]] = []

        def oracle(case: Case, inputs: Sequence[Any], me: int) -> Any:
            if not known or known[0][0] is not inputs:
                known[:] = [(inputs, _steps(case, inputs, update, loss, carry(len(inputs))))]
            return those(known[0][1][me], keys)

        return oracle

    mistakes = {name: steps(matrix) for name, matrix in UPDATE_MISTAKES.items()}
    mistakes |= {name: steps(loss=matrix) for name, matrix in LOSS_MISTAKES.items()}
    # The old gradient counts once if the ranks' mean is taken, and K times if their sum is.
    name = "a step with an older gradient in it, too: clear .grad before each backward"
    mistakes |= {name: steps(carry=lambda k: 1), f"{name} ": steps(carry=lambda k: k)}
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
    case: Case,
    inputs: Sequence[Mapping[str, Any]],
    update: Matrix,
    loss: Matrix,
    carry: float,
) -> list[dict[str, Any]]:
    """Return the results of each member k if its step is ``w -= lr * sum_j update[k, j] g_j``.

    g_j is the gradient of member j on its rows, at its own weights. The sum also contains `carry`
    times the sum of the last step, or of the old content of ``.grad``.
    """
    models = [_model_of(each, [w.double() for w in each["weights"]]) for each in inputs]
    for model in models:
        model.train(case.form.training)
    last: list[list[Any]] = [
        [0.0 if before is None else before.double() for before in each["before"] or [None] * 4]
        for each in inputs
    ]
    dtype = inputs[0]["weights"][0].dtype
    mixed_losses = []
    for step in range(STEPS):
        rows = torch.tensor([len(each["x"][step]) for each in inputs], dtype=torch.float64)
        weights = update(rows)
        own_losses, grads = [], []
        for model, each in zip(models, inputs, strict=True):
            own_loss = mean_loss(model, each["loss"], each["x"][step], each["y"][step])
            own_losses.append(own_loss.item())
            grads.append(torch.autograd.grad(own_loss, list(model.parameters())))
        for k, model in enumerate(models):
            for i, param in enumerate(model.parameters()):
                mixture = sum(m * g[i] for m, g in zip(weights[k], grads, strict=True))
                last[k][i] = mixture + carry * last[k][i]
                param.data -= inputs[k]["lr"][step] * last[k][i]
        mixed_losses.append(loss(rows) @ torch.tensor(own_losses, dtype=torch.float64))
    return [
        {
            "parameter {} after two steps": [p.detach().to(dtype) for p in model.parameters()],
            "buffer {} after two steps": [
                b.to(dtype) if b.is_floating_point() else b for b in model.buffers()
            ],
            "loss returned by step {}": [losses[k].item() for losses in mixed_losses],
        }
        for k, model in enumerate(models)
    ]
