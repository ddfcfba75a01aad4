"""The variance of a batch's gradient, measured: inputs, program, judge.

A measurement is right if it is as near to the theory, σ²/B · (N − B)/(N − 1), as chance lets it be:
within six standard deviations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, combinations_with_replacement
from math import inf
from typing import Any

import torch
from torch import Tensor

from course_lib.checking.accumulation import draw_model, draw_rows, model_of
from course_lib.checking.answers import NUMBER, sees
from course_lib.checking.batches import FROM_GENERATOR, seed_of
from course_lib.checking.cases import Case, Wrong
from course_lib.checking.judges import equals
from course_lib.checking.on_ranks.given import Given
from course_lib.checking.shared.training import loss_of, make_model, mean_loss

DRAWS = 400


def variance_inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Draw a model and ``n`` rows; the case has ``batch_size``, ``num_batches`` and ``loss``.

    It may have ``calls``: so many more of them, all with one generator, for `drawn_anew`.
    """
    asked = {key: case.parameters[key] for key in ("loss", "batch_size", "num_batches")}
    x, y = draw_rows(case.parameters["n"], asked["loss"], generator)
    asked["calls"] = case.parameters.get("calls", 0)
    return [{**draw_model(case, generator), **asked, "x": x, "y": y, "seed": seed_of(generator)}]


def variance_program(gradient_variance: Callable[..., Any], mine: Any, given: Given) -> Any:
    """Call the function twice with the same seed; return its numbers, and what should stay."""
    model, loss_fn = given.model(model_of(mine)), loss_of(mine["loss"])
    arguments = model, loss_fn, mine["x"], mine["y"], mine["batch_size"], mine["num_batches"]
    found = [
        gradient_variance(*arguments, torch.Generator().manual_seed(mine["seed"])) for _ in range(2)
    ]
    generator = torch.Generator().manual_seed(mine["seed"] + 1)
    more = [gradient_variance(*arguments, generator) for _ in range(mine["calls"])]
    return {
        "variance returned by call {}": found,
        "more": more,
        ".grad of parameter {} after the call": [param.grad for param in model.parameters()],
        "parameter {} after the call": [param.detach() for param in model.parameters()],
    }


def _as_it_was(mine: Any) -> dict[str, Any]:
    return {
        ".grad of parameter {} after the call": mine["before"],
        "parameter {} after the call": mine["weights"],
    }


def _form(case: Case, inputs: Sequence[Any], rank: int) -> Any:
    """Return the form of an answer: numbers, and the model as it was before."""
    numbers = {"variance returned by call {}": [NUMBER] * 2, "more": [NUMBER] * inputs[0]["calls"]}
    return {**numbers, **_as_it_was(inputs[0])}


@sees(_form)
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
        right = (
            "It is the mean of |g_B - ∇F|², over num_batches batches that are drawn anew from all "
            "rows, and over all parameters together."
        )
        raise Wrong(
            f"{asked} is {first:.5g}, expected {theory:.5g}, by chance {chance:.2g} more or less",
            # Near is not equal: other mistakes may come as near.
            f"This is about {name}. If that is not what you compute: {right}"
            if (name := next(close, ""))
            else right,
        )
    if first != second:
        raise Wrong(
            f"{asked} is another number the second time, with the same seed", FROM_GENERATOR
        )


@sees(_form)
def drawn_anew(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
    """Judge ``calls`` more numbers exactly: few rows have few batches, and few numbers are right.

    Each must be the mean over some ``num_batches`` batches, and among them every batch must occur,
    also beside others than its fellows of an epoch.
    """
    if not values[0]["more"]:
        return
    size, count = case.parameters["batch_size"], case.parameters["num_batches"]
    rows = row_gradients(inputs[0])
    full, n = rows.mean(0), len(rows)
    means = {drawn: rows[list(drawn)].mean(0) for drawn in combinations(range(n), size)}
    lengths = {drawn: (mean - full).square().sum().item() for drawn, mean in means.items()}
    near = {"float64": 1e-10}.get(case.form.dtype, 1e-5) * sum(lengths.values())
    different = sorted(lengths.values())
    different = [a for a, b in zip(different, [*different[1:], inf], strict=True) if b - a > near]
    asked = f"the variance of {count} batches of {size} of {n} rows"
    seen: set[tuple[float, ...]] = set()
    for value in values[0]["more"]:
        got = float(value)
        fitting = [
            drawn
            for drawn in combinations_with_replacement(different, count)
            if abs(sum(drawn) / count - got) <= near
        ]
        if not fitting:
            told = ", ".join(f"{each:.5g}" for each in different)
            raise Wrong(
                f"{asked} is {got:.5g}, and no {count} batches give that: |g_B - ∇F|² is one of "
                f"{told}",
                _named_otherwise(got, list(means.values()), count, near),
            )
        seen.update(fitting)
    if len(seen) == 1:
        hint = f"What the generator draws next is another batch. {FROM_GENERATOR}"
        raise Wrong(f"{asked} is the same number in each of {len(values[0]['more'])} calls", hint)
    if all(len(set(drawn)) == 1 for drawn in seen):
        hint = (
            "num_batches of them, each drawn anew from all rows: not one alone, and not the next "
            "one of an epoch."
        )
        raise Wrong(f"{asked}: in no call the batches miss by different lengths", hint)
    if missing := sorted(set(different) - {each for drawn in seen for each in drawn}):
        hint = "Each row may be in a batch with each other one."
        raise Wrong(f"{asked}: no batch misses by |g_B - ∇F|² = {missing[0]:.5g}", hint)


def _named_otherwise(got: float, means: Sequence[Tensor], count: int, near: float) -> str:
    """Return a hint if `got` is the spread of some batches around their own mean."""
    for drawn in combinations_with_replacement(means, count):
        spread = (torch.stack(drawn) - torch.stack(drawn).mean(0)).square().sum().item()
        for divisor in (count, max(1, count - 1)):
            if abs(spread / divisor - got) <= near:
                return "This is the spread around the batches' own mean: ∇F is of all rows."
    return ""


@sees(_form)
def model_stays(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
    """Judge whether weights and gradients are what they were."""
    gradients, weights = ".grad of parameter {} after the call", "parameter {} after the call"
    for key, right, hint in (
        (gradients, "before", "torch.autograd.grad does not touch .grad; backward() adds to it."),
        (weights, "weights", "Measure at the weights that the model has, and take no step."),
    ):
        stays = {key: inputs[0][right]}
        try:
            equals(lambda *_, stays=stays: stays)(case, inputs, [{key: values[0].get(key)}])
        except Wrong as wrong:
            raise Wrong(wrong.message, hint) from None


def row_gradients(mine: Any) -> Tensor:
    """Return the gradient of every single row, one per line, in float64."""
    model = make_model([weight.double() for weight in mine["weights"]])
    params = list(model.parameters())
    lines = []
    for x, y in zip(mine["x"].split(1), mine["y"].split(1), strict=True):
        gradients = torch.autograd.grad(mean_loss(model, mine["loss"], x, y), params)
        lines.append(torch.cat([gradient.flatten() for gradient in gradients]))
    return torch.stack(lines)
