"""Scripts that are given their batches: inputs, program, and what one process computes.

Each batch makes one step. K ranks' script is replayed as K replicas in one process, right or with
a mistake that people make.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.checking.cases import Case
from course_lib.checking.judges import Oracle
from course_lib.checking.on_ranks.given import Given
from course_lib.checking.shared.averaging import MISTAKES, Matrix, mean, own
from course_lib.checking.shared.training import (
    CLASSES,
    FEATURES,
    SHAPES,
    loss_of,
    make_model,
    mean_loss,
    targets_of,
)


class Experts(nn.Module):
    """Two linear experts: the sign of a row's first feature says which one it goes to."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(FEATURES, CLASSES, device="meta") for _ in range(2))
        for expert, w, b in zip(self.experts, weights[::2], weights[1::2], strict=True):
            expert.weight, expert.bias = nn.Parameter(w.clone()), nn.Parameter(b.clone())

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of the experts, each row's of its own; an expert may have no rows."""
        out = x.new_zeros(len(x), CLASSES)
        for i, expert in enumerate(self.experts):
            rows = (x[:, 0] > 0) == bool(i)
            if rows.any():
                out = out.index_put((rows.nonzero()[:, 0],), expert(x[rows]))
        return out


def model_of_kind(kind: str, weights: Sequence[Tensor], frozen: Sequence[int] = ()) -> nn.Module:
    """Return the ``plain`` network, that with ``norm`` (BatchNorm), or the one with ``experts``."""
    if kind == "experts":
        model: nn.Module = Experts(weights)
    else:
        model = make_model(weights)
        if kind == "norm":
            model[1] = nn.BatchNorm1d(SHAPES[0][0]).to(weights[0].dtype)  # type: ignore[operator]
    for i, param in enumerate(model.parameters()):
        param.requires_grad_(i not in frozen)
    return model


def batches_inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Draw the same weights for all ranks, and other batches for each.

    The case has ``kind`` (of model), ``steps``, ``rows`` (of a rank's batch) and ``lr``, and may
    have ``loss``, ``frozen`` (positions of parameters) and ``large``, what targets are multiplied
    by. For ``experts``, rank r's batch t has rows for one expert only if r + t is even.
    """
    p = case.parameters
    kind, loss = p["kind"], p.get("loss", "cross_entropy")
    shapes = ((CLASSES, FEATURES), (CLASSES,)) * 2 if kind == "experts" else SHAPES

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    weights, test = [0.3 * randn(*shape) for shape in shapes], randn(p["rows"] + 2, FEATURES)
    drawn = []
    for rank in range(case.world_size):
        x = [randn(p["rows"], FEATURES) + 0.5 * rank for _ in range(p["steps"])]
        y = [p.get("large", 1) * randn(p["rows"], CLASSES) for _ in x]
        if kind == "experts":
            for t, rows in enumerate(x):
                rows[:, 0] = rows[:, 0].abs() if (rank + t) % 2 == 0 else rows[:, 0]
        y = [targets_of(loss, each) for each in y]
        own = {"weights": weights, "x": x, "y": y, "kind": kind, "lr": p["lr"], "loss": loss}
        drawn.append({**own, "frozen": list(p.get("frozen", ())), "test": test})
    return drawn


def batches_program(script: Callable[..., Any], mine: Any, given: Given) -> Any:
    """Train with the script; what comes back are the replica's weights, and with ``norm`` more.

    A script of the kind ``norm`` gets rows to test with as well, and returns its predictions.
    """
    model = given.model(model_of_kind(mine["kind"], mine["weights"], mine["frozen"]))
    batches = given.iterable(list(zip(mine["x"], mine["y"], strict=True)))
    tested = [mine["test"]] if mine["kind"] == "norm" else []
    loss_fn = loss_of(mine["loss"])
    shown = script(model, loss_fn, batches, *tested, mine["lr"], group=given.group)
    found: dict[str, Any] = {
        "parameter {} at the end": [param.detach() for param in model.parameters()]
    }
    if tested:
        found["prediction"] = shown.detach() if isinstance(shown, Tensor) else shown
        found["buffer {} at the end"] = [buffer.clone() for buffer in model.buffers()]
    return found


def with_batches(
    mix: Matrix = mean, *, averages: str = "gradients", buffers: str = "first"
) -> Oracle:
    """Return the oracle of a script that takes one step per batch, right or with a mistake.

    Args:
        mix: how gradients are mixed over the members.
        averages: ``gradients``, or ``parameters``: before each rank's own step.
        buffers: whose buffers the models end with: the ``first`` member's, each its ``own``, or the
            first's before the last batch and then changed by each one's own, ``late``.

    """

    def oracle(case: Case, inputs: Sequence[Any], me: int) -> Any:
        k, mine, steps = len(inputs), inputs[me], case.parameters["steps"]
        weights = [weight.double() for weight in mine["weights"]]
        models = [model_of_kind(mine["kind"], weights).train(case.form.training) for _ in inputs]
        matrix = mix(torch.ones(k, dtype=torch.float64))
        for step in range(steps):
            if buffers == "late" and step == steps - 1:
                _take_over_buffers(models)
            theirs = [_gradient(m, each, step) for m, each in zip(models, inputs, strict=True)]
            columns = list(zip(*(list(m.parameters()) for m in models), strict=True))
            for n, params in enumerate(columns):
                if n in mine["frozen"]:
                    continue
                middle = torch.stack([param.detach() for param in params]).mean(0)
                for i, param in enumerate(params):
                    if averages == "parameters":
                        param.data = middle - mine["lr"] * theirs[i][n]
                    else:
                        mixture = sum(matrix[i, j] * theirs[j][n] for j in range(k))
                        param.data -= mine["lr"] * mixture
        if buffers == "first":
            _take_over_buffers(models)
        return _shown(models[me], mine)

    return oracle


def _take_over_buffers(models: Sequence[nn.Module]) -> None:
    """Give all models the first one's buffers."""
    for model in models[1:]:
        for mine, first in zip(model.buffers(), models[0].buffers(), strict=True):
            mine.copy_(first)


def _gradient(model: nn.Module, mine: Any, step: int) -> Sequence[Tensor]:
    loss = mean_loss(model, mine["loss"], mine["x"][step], mine["y"][step])
    params = list(model.parameters())
    return torch.autograd.grad(loss, params, allow_unused=True, materialize_grads=True)


def _shown(model: nn.Module, mine: Any) -> dict[str, Any]:
    """Return what `batches_program` shows of a model that was trained in float64."""
    dtype = mine["weights"][0].dtype

    def plain(tensor: Tensor) -> Tensor:
        return tensor.detach().to(dtype) if tensor.is_floating_point() else tensor

    found: dict[str, Any] = {"parameter {} at the end": [plain(p) for p in model.parameters()]}
    if mine["kind"] == "norm":
        with torch.no_grad():
            found["prediction"] = plain(model.eval()(mine["test"].double()))
        found["buffer {} at the end"] = [plain(buffer) for buffer in model.buffers()]
    return found


BATCHES_MISTAKES: Mapping[str, Oracle] = {
    "a run with this rank's own gradients: nothing was averaged": with_batches(own),
    "a run with the sum of the ranks' gradients, not their mean": with_batches(
        MISTAKES["the sum over the ranks, not the mean"]
    ),
    "a run with gradients divided by the number of ranks once more": with_batches(
        MISTAKES["the mean divided by the number of ranks once more"]
    ),
    "a run that averages parameters, and then takes a step of its own": with_batches(
        averages="parameters"
    ),
    "the weights before training: every gradient was zero": with_batches(
        lambda rows: 0 * own(rows)
    ),
    "what this rank's own running means give: the buffers came apart": with_batches(buffers="own"),
    "what you get when this rank's last batch has changed its running means: they come apart again "
    "in every forward in training mode": with_batches(buffers="late"),
}
