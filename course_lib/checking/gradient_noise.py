"""The variance of a batch's gradient, measured: inputs, program, judge.

A measurement is right if it is as near to the theory, σ²/B · (N − B)/(N − 1), as chance lets it be:
within six standard deviations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from course_lib.checking.accumulation import draw_model, draw_rows, mean_loss, model_of
from course_lib.checking.answers import NUMBER, sees
from course_lib.checking.batches import FROM_GENERATOR, seed_of
from course_lib.checking.cases import Case, Wrong
from course_lib.checking.given import Given
from course_lib.checking.judges import equals
from course_lib.checking.training import make_model

DRAWS = 400


def variance_inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Draw a model and ``n`` rows; the case has ``batch_size``, ``num_batches`` and ``loss``."""
    asked = {key: case.parameters[key] for key in ("loss", "batch_size", "num_batches")}
    x, y = draw_rows(case.parameters["n"], asked["loss"], generator)
    return [{**draw_model(generator), **asked, "x": x, "y": y, "seed": seed_of(generator)}]


def variance_program(gradient_variance: Callable[..., Any], mine: Any, given: Given) -> Any:
    """Call the function twice with the same seed; return both numbers, and what should stay."""
    model, loss_fn = given.model(model_of(mine)), getattr(F, mine["loss"])
    arguments = model, loss_fn, mine["x"], mine["y"], mine["batch_size"], mine["num_batches"]
    found = [
        gradient_variance(*arguments, torch.Generator().manual_seed(mine["seed"])) for _ in range(2)
    ]
    return {
        "variance returned by call {}": found,
        ".grad of parameter {} after the call": [param.grad for param in model.parameters()],
        "parameter {} after the call": [param.detach() for param in model.parameters()],
    }


@sees(
    lambda case, inputs, rank: {
        "variance returned by call {}": [NUMBER, NUMBER],
        **_as_it_was(inputs[0]),
    }
)
def near_the_theory(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
    """Judge the first number by the theory, and the second by the first."""
    mine, n, size = inputs[0], case.parameters["n"], case.parameters["batch_size"]
    asked = f"the variance of batches of {size} of {n} rows"
    rows = row_gradients(mine)
    full = rows.mean(0)
    sigma2 = (rows - full).square().sum(1).mean().item()
    theory = sigma2 / size * (n - size) / (n - 1)
    generator = torch.Generator().manual_seed(0)
    draws = [rows[torch.randperm(n, generator=generator)[:size]].mean(0) for _ in range(DRAWS)]
    spread = (torch.stack(draws) - full).square().sum(1).std().item()
    chance = 6 * spread / case.parameters["num_batches"] ** 0.5 + 1e-6 * sigma2
    first, second = (float(value) for value in values[0]["variance returned by call {}"])
    if not abs(first - theory) <= chance:
        others = {
            "σ²/B: batches that are drawn with replacement": sigma2 / size,
            "σ², the spread of single rows": sigma2,
            "a mean over the parameters' numbers: a squared length is their sum": (
                theory / rows.shape[1]
            ),
            "the square root of the variance": theory**0.5,
        }
        near = chance / max(theory, 1e-30)  # by chance, relative
        close = (name for name, other in others.items() if abs(first - other) <= near * other)
        raise Wrong(
            f"{asked} is {first:.5g}, expected {theory:.5g}, by chance {chance:.2g} more or less",
            f"This is about {name}." if (name := next(close, "")) else "",
        )
    if first != second:
        raise Wrong(
            f"{asked} is another number the second time, with the same seed", FROM_GENERATOR
        )


def _as_it_was(mine: Any) -> dict[str, Any]:
    return {
        ".grad of parameter {} after the call": mine["before"],
        "parameter {} after the call": mine["weights"],
    }


@sees(near_the_theory.__dict__["sees"])
def model_stays(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
    """Judge whether weights and gradients are what they were."""
    right = _as_it_was(inputs[0])
    equals(lambda *_: right)(case, inputs, [{key: values[0][key] for key in right}])


def row_gradients(mine: Any) -> Tensor:
    """Return the gradient of every single row, one per line, in float64."""
    model = make_model([weight.double() for weight in mine["weights"]])
    params = list(model.parameters())
    lines = []
    for x, y in zip(mine["x"].split(1), mine["y"].split(1), strict=True):
        gradients = torch.autograd.grad(mean_loss(model, mine["loss"], x, y), params)
        lines.append(torch.cat([gradient.flatten() for gradient in gradients]))
    return torch.stack(lines)
