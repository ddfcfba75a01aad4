"""Whole training runs of one process, which those of K ranks must equal: oracles and inputs.

`with_epochs` knows a training function that samples, accumulates and steps; `with_batches` a script
that is given its batches. Both replay K replicas in one process, and the mistakes that people make.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data.distributed import DistributedSampler

from course_lib.checking.averaging import MISTAKES, Matrix, mean, own
from course_lib.checking.cases import Case
from course_lib.checking.judges import Oracle
from course_lib.checking.training import CLASSES, FEATURES, SHAPES, make_model

Batch = list[int]


def batches_of(p: Mapping[str, Any], epoch: int) -> list[Batch]:
    """Return the batches of row numbers of member ``p["me"]`` of ``p["k"]`` in an epoch.

    PyTorch's sampler decides. Of mistakes: ``shuffle``, ``tell`` (which epoch it is),
    ``drop_last``, ``short`` (whether a short last batch is kept).
    """
    sampler: DistributedSampler[int] = DistributedSampler(
        range(p["length"]),  # type: ignore[arg-type]
        *(p["k"], p["me"], p.get("shuffle", True), p["seed"], p.get("drop_last", False)),
    )
    if p.get("tell", True):
        sampler.set_epoch(epoch)
    rows, size = list(sampler), p["batch_size"]
    cut = [rows[at : at + size] for at in range(0, len(rows), size)]
    return [batch for batch in cut if p.get("short", True) or len(batch) == size]


def windows_of(p: Mapping[str, Any], k: int) -> list[list[list[Batch]]]:
    """Return the windows of a run: for each the micro-batches, for each the members' rows.

    Of mistakes: ``keep_last`` (whether an incomplete window makes a step), and those of
    `batches_of`.
    """
    windows = []
    for epoch in range(p["first"], p["first"] + p["count"]):
        theirs = [batches_of({**p, "k": k, "me": me}, epoch) for me in range(k)]
        micro = [list(each) for each in zip(*theirs, strict=True)]
        size = p["accumulate"]
        cut = [micro[at : at + size] for at in range(0, len(micro), size)]
        windows += [w for w in cut if p.get("keep_last", True) or len(w) == size]
    return windows


def epochs_inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Draw the same rows for all ranks, and other weights for each.

    The case has ``length``, ``batch_size``, ``accumulate``, ``first`` and ``count`` (of epochs),
    ``seed`` and ``lr``, and may have ``loss``.
    """
    p = case.parameters
    x = torch.randn(p["length"], FEATURES, generator=generator)
    y = torch.randn(p["length"], CLASSES, generator=generator)
    loss = p.get("loss", "cross_entropy")
    return [
        {
            **p,
            "loss": loss,
            "x": x,
            "y": y if loss == "mse_loss" else y.argmax(1),
            "weights": [0.3 * torch.randn(shape, generator=generator) for shape in SHAPES],
        }
        for _ in range(case.world_size)
    ]


def with_epochs(
    mix: Matrix = mean,
    *,
    start: str = "first",
    scale: str = "rows",
    loss: str = "all",
    carry: float = 0,
    **sampler: Any,
) -> Oracle:
    """Return the oracle of a training function, right or with a mistake.

    Args:
        mix: how gradients are mixed over the members.
        start: ``first``: all begin with the first member's weights; ``own``.
        scale: what a row's gradient is divided by: ``rows`` of the window, the rows of its
            micro-batch and ``accumulate`` or ``micro`` (the micro-batches of the window), or
            ``none``: the rows of its micro-batch only.
        loss: of a step that is returned: ``all`` rows, this rank's ``own``, or their ``sum``.
        carry: how much of the last step's gradient is still in it.
        **sampler: mistakes of `windows_of`.

    """

    def oracle(case: Case, inputs: Sequence[Any], me: int) -> Any:
        p, k = {**case.parameters, **sampler}, len(inputs)
        models = [
            make_model(_double(inputs[i if start == "own" else 0]["weights"])) for i in range(k)
        ]
        matrix = mix(torch.ones(k, dtype=torch.float64))
        last = [[torch.zeros(()).double() for _ in SHAPES] for _ in models]
        losses = []
        for window in windows_of(p, k):
            shares = [
                _share(model, inputs[j], [micro[j] for micro in window], scale, p["accumulate"])
                for j, model in enumerate(models)
            ]
            for i, model in enumerate(models):
                for n, param in enumerate(model.parameters()):
                    mixture = sum(matrix[i, j] * shares[j][1][n] for j in range(k))
                    last[i][n] = mixture + carry * last[i][n]
                    param.data -= p["lr"] * last[i][n]
            theirs = [share[0] for share in shares]
            losses.append(
                theirs[me] if loss == "own" else sum(theirs) / (1 if loss == "sum" else k)
            )
        dtype = inputs[me]["weights"][0].dtype
        return {
            "parameter {} after training": [p.detach().to(dtype) for p in models[me].parameters()],
            "loss of step {}": losses,
        }

    return oracle


def _share(
    model: nn.Module, mine: Any, window: list[Batch], scale: str, accumulate: int
) -> tuple[float, list[Tensor]]:
    """Return a member's mean loss over its rows of a window, and the gradient that it sums up."""
    rows = sum(map(len, window))
    total: Any = 0.0
    shown = 0.0
    for batch in window:
        y = mine["y"][batch]
        mean_loss = getattr(F, mine["loss"])(
            model(mine["x"][batch].double()), y.double() if y.is_floating_point() else y
        )
        divisor = {"accumulate": accumulate, "micro": len(window), "none": 1}
        total += mean_loss * (len(batch) / rows if scale == "rows" else 1 / divisor[scale])
        shown += mean_loss.item() * len(batch) / rows
    return shown, list(torch.autograd.grad(total, list(model.parameters())))


EPOCHS_MISTAKES: dict[str, Oracle] = {
    "a run whose epochs all have the order of epoch 0: tell the sampler (set_epoch)": with_epochs(
        tell=False
    ),
    "a run that leaves out a last, incomplete window: it makes a step, too": with_epochs(
        keep_last=False
    ),
    "a run that drops rows (drop_last)": with_epochs(drop_last=True),
    "a run that drops the last, short micro-batch": with_epochs(short=False),
    "a run without shuffling": with_epochs(shuffle=False),
    "a run in which a short micro-batch counts as much as a full one": with_epochs(scale="micro"),
    "a run that divides by `accumulate` also where a window has fewer micro-batches": with_epochs(
        scale="accumulate"
    ),
    "a run that adds up the means of a window's micro-batches: divide": with_epochs(scale="none"),
    "a run with this rank's own gradients: nothing was averaged": with_epochs(own),
    "a run with the sum of the ranks' gradients, not their mean": with_epochs(
        MISTAKES["the sum over the ranks, not the mean"]
    ),
    "a run with gradients divided by the number of ranks once more": with_epochs(
        MISTAKES["the mean divided by the number of ranks once more"]
    ),
    "a run in which each rank began with weights of its own": with_epochs(start="own"),
    "a run whose gradients are never cleared: zero_grad is missing": with_epochs(carry=1),
    "the loss of this rank's own rows: average it as well": with_epochs(loss="own"),
    "the sum of the ranks' losses, not their mean": with_epochs(loss="sum"),
}


# A script that is given its batches --------------------------------------------------------


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


def museum_model(kind: str, weights: Sequence[Tensor]) -> nn.Module:
    """Return the ``plain`` network, that with ``norm`` (BatchNorm), or the one with ``experts``."""
    if kind == "experts":
        return Experts(weights)
    model = make_model(weights)
    if kind == "norm":
        model[1] = nn.BatchNorm1d(SHAPES[0][0]).to(weights[0].dtype)  # type: ignore[operator]
    return model


def museum_inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Draw the same weights for all ranks, and other batches for each.

    The case has ``kind`` (of model), ``steps``, ``rows`` (of a rank's batch) and ``lr``, and may
    have ``loss``. For ``experts``, rank r's batch t has rows for one expert only if r + t is even.
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
        y = [randn(p["rows"], CLASSES) for _ in x]
        if kind == "experts":
            for t, rows in enumerate(x):
                rows[:, 0] = rows[:, 0].abs() if (rank + t) % 2 == 0 else rows[:, 0]
        if loss != "mse_loss":
            y = [each.argmax(1) for each in y]
        own = {"weights": weights, "x": x, "y": y, "kind": kind, "lr": p["lr"], "loss": loss}
        drawn.append({**own, "test": test})
    return drawn


def with_batches(
    mix: Matrix = mean, *, averages: str = "gradients", buffers: int | None = 0
) -> Oracle:
    """Return the oracle of a script that takes one step per batch, right or with a mistake.

    Args:
        mix: how gradients are mixed over the members.
        averages: ``gradients``, or ``parameters``: before each rank's own step.
        buffers: whose buffers the predictions at the end are made with; ``None``: each its own.

    """

    def oracle(case: Case, inputs: Sequence[Any], me: int) -> Any:
        k, mine = len(inputs), inputs[me]
        training = case.form.training
        models = [
            museum_model(mine["kind"], _double(mine["weights"])).train(training) for _ in inputs
        ]
        matrix = mix(torch.ones(k, dtype=torch.float64))
        for step in range(case.parameters["steps"]):
            theirs = [_gradient(m, each, step) for m, each in zip(models, inputs, strict=True)]
            columns = list(zip(*(list(m.parameters()) for m in models), strict=True))
            for n, params in enumerate(columns):
                middle = torch.stack([param.detach() for param in params]).mean(0)
                for i, param in enumerate(params):
                    if averages == "parameters":
                        param.data = middle - mine["lr"] * theirs[i][n]
                    else:
                        mixture = sum(matrix[i, j] * theirs[j][n] for j in range(k))
                        param.data -= mine["lr"] * mixture
        dtype = mine["weights"][0].dtype
        found = {"parameter {} at the end": [p.detach().to(dtype) for p in models[me].parameters()]}
        if mine["kind"] == "norm":
            shown = models[me if buffers is None else buffers].eval()
            with torch.no_grad():
                found["prediction"] = shown(mine["test"].double()).to(dtype)
        return found

    return oracle


def _gradient(model: nn.Module, mine: Any, step: int) -> Sequence[Tensor]:
    x, y = mine["x"][step].double(), mine["y"][step]
    loss = getattr(F, mine["loss"])(model(x), y.double() if y.is_floating_point() else y)
    params = list(model.parameters())
    return torch.autograd.grad(loss, params, allow_unused=True, materialize_grads=True)


def _double(weights: Sequence[Tensor]) -> list[Tensor]:
    return [weight.double() for weight in weights]


STEPS_MISTAKES: dict[str, Oracle] = {
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
    "a prediction with this rank's own running means: the buffers came apart": with_batches(
        buffers=None
    ),
}
