"""Evaluation that counts each row once: inputs, program, judges."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.checking.answers import NUMBER, WHOLE, Kind, ListOf, sees
from course_lib.checking.cases import Case, Wrong
from course_lib.checking.judges import Oracle, equals, same_on_all_ranks
from course_lib.checking.on_ranks.given import Given
from course_lib.checking.shared.training import CLASSES, FEATURES, SHAPES, loss_of, make_model

NUMBERS = ("mean loss", "accuracy")


class Watched(nn.Module):
    """A classifier with BatchNorm and dropout, which notes how many rows it is given, and when."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()
        net = make_model(weights)
        first, _, last = net.children()
        norm = nn.BatchNorm1d(SHAPES[0][0])
        norm.running_mean, norm.running_var = weights[1].clone(), 1 + weights[1].square()
        self.layers = nn.Sequential(first, norm, last, nn.Dropout()).to(weights[0].dtype)
        self.rows: list[int] = []
        self.trained = False

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of these rows."""
        self.rows.append(len(x))
        self.trained |= any(module.training for module in self.layers)
        out: Tensor = self.layers(x)
        return out


def evaluate_inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Draw the same model and the same rows for all ranks of a group.

    The case has ``length`` and ``batch_size``, and may have ``loss`` and ``labels``, their dtype.
    """
    p = case.parameters
    weights = [0.5 * torch.randn(shape, generator=generator) for shape in SHAPES]
    drawn: dict[int, dict[str, Any]] = {}
    for members in case.groups:
        y = torch.randint(CLASSES, (p["length"],), generator=generator)
        own = {
            "weights": weights,
            "x": torch.randn(p["length"], FEATURES, generator=generator),
            "y": y.to(getattr(torch, p.get("labels", "int64"))),
            "loss": p.get("loss", "cross_entropy"),
            "batch_size": p["batch_size"],
        }
        drawn |= dict.fromkeys(members, own)
    return [drawn[rank] for rank in range(case.world_size)]


def evaluate_program(evaluate: Callable[..., Any], mine: Any, given: Given) -> Any:
    """Call ``evaluate(model, loss_fn, x, y, batch_size, group=group)``; tell what the model saw."""
    model = Watched(mine["weights"])
    given.model(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    loss_fn = loss_of(mine["loss"])
    x, y, size = mine["x"], mine["y"], mine["batch_size"]
    answer: Any = evaluate(model, loss_fn, x, y, size, group=given.group)
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise TypeError(f"evaluate returns {answer!r:.60}, not a pair (mean loss, accuracy)")
    if any(p.grad is None or not bool((p.grad == 1).all()) for p in model.parameters()):
        raise RuntimeError("evaluate changes the gradients of the model: it was asked to look")
    # In training mode BatchNorm moves its buffers: then the mode is what to speak of.
    moved = any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    if moved and not model.trained:
        raise RuntimeError("evaluate changes parameters or buffers: it was asked to look")
    seen: dict[str, Any] = {"rows": [0, *model.rows], "in training mode": model.trained}
    return {**seen, NUMBERS[0]: answer[0], NUMBERS[1]: answer[1]}


def evaluated(
    rows: Callable[[int, int, int], list[int]] = lambda n, k, me: list(range(n)),
    parts: Callable[[int, int, int], list[list[int]]] | None = None,
    weigh: Callable[[float], float] = lambda share: 1.0,
) -> Oracle:
    """Return the oracle of an evaluation over these rows, or of a mean over parts of all rows.

    Args:
        rows: ``rows(n, k, me)``: those that count.
        parts: ``parts(n, k, batch_size)``, of which the mean is taken instead.
        weigh: ``weigh(parts / rows)``: what a part's mean is multiplied by.

    """

    def oracle(case: Case, inputs: Sequence[Any], me: int) -> Any:
        mine, k = inputs[me], len(inputs)
        n = len(mine["x"])
        model = Watched([w.double() for w in mine["weights"]]).eval()
        chosen = parts(n, k, mine["batch_size"]) if parts else [rows(n, k, me)]
        chosen = [part for part in chosen if part]
        results = []
        for part in chosen:
            with torch.no_grad():
                out, y = model(mine["x"].double()[part]), mine["y"][part]
            right = (out.argmax(1) == y).double().mean().item()
            factor = weigh(len(chosen) / n)
            results.append((factor * loss_of(mine["loss"])(out, y).item(), factor * right))
        if not results:
            return {}
        means = (math.fsum(column) / len(results) for column in zip(*results, strict=True))
        return dict(zip(NUMBERS, means, strict=True))

    return oracle


def _padded(n: int, k: int, me: int) -> list[int]:
    """Return all rows of a sampler that pads."""
    return [i % n for i in range(-(-n // k) * k)]


def _batches(n: int, k: int, size: int) -> list[list[int]]:
    strided = [list(range(n))[rank::k] for rank in range(k)]
    return [rows[at : at + size] for rows in strided for at in range(0, n, size)]


EVALUATION_MISTAKES = {
    "what you get when padded rows are counted: a sampler gives every rank equally many": evaluated(
        _padded
    ),
    "the mean of the ranks' means, whatever their rows (strided shards)": evaluated(
        parts=lambda n, k, size: [list(range(n))[r::k] for r in range(k)]
    ),
    "the result of this rank's rows alone": evaluated(lambda n, k, me: list(range(n))[me::k]),
    "the result without the last rows, which no rank looked at": evaluated(
        lambda n, k, me: list(range(n - n % k))
    ),
    "the mean of the batches' means: a short batch counts as much as a full one": evaluated(
        parts=_batches
    ),
    "the sum of the batches' means, divided by the rows: loss_fn gives a mean, multiply it by the "
    "rows of its batch": evaluated(parts=_batches, weigh=lambda share: share),
}


_FLAG = Kind("a flag", lambda value: isinstance(value, bool))
_SEEN = {"rows": ListOf(WHOLE), "in training mode": _FLAG, **dict.fromkeys(NUMBERS, NUMBER)}


@sees(_SEEN)
def right_numbers(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
    """Judge the model's mode, and the two numbers."""
    for rank, value in enumerate(values):
        if value["in training mode"] is not False:
            raise Wrong(
                f"rank {rank}: the model was given rows in training mode",
                "model.eval() first: dropout drops nothing then, and BatchNorm takes its running "
                "means.",
            )
        for name in NUMBERS:
            if isinstance(value[name], float) and math.isnan(value[name]):
                raise Wrong(
                    f"rank {rank}: {name} is nan",
                    "The mean of no rows is nan: a rank may have none, where there are few.",
                )
    only = [{name: value[name] for name in NUMBERS} for value in values]
    # The ranks' sums may be in float32: float64 shows there, and nothing that matters.
    near = {"float64": 1e-6}
    equals(evaluated(), EVALUATION_MISTAKES, tolerance=near)(case, inputs, only)
    same_on_all_ranks(case, inputs, only)


@sees(_SEEN)
def shared_work(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
    """Judge who looked at how many rows."""
    for members in case.groups:
        for rank in members:
            n, size = len(inputs[rank]["x"]), inputs[rank]["batch_size"]
            seen, most = sum(values[rank]["rows"]), max(values[rank]["rows"], default=0)
            fair = -(-n // len(members))
            if seen > fair:
                raise Wrong(
                    f"rank {rank}: the model was given {seen} of the {n} rows, expected at most "
                    f"{fair}",
                    "The ranks share the work: each looks at its own part only.",
                )
            if most > size:
                raise Wrong(
                    f"rank {rank}: the model was given {most} rows at once, expected at most {size}"
                )
