"""Steps of decentralized SGD: inputs, program, and what comes out of them.

A step mixes with the neighbours, and goes down this rank's own gradient at the weights before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from course_lib.checking.cases import Case
from course_lib.checking.judges import Oracle, equals
from course_lib.checking.mixing import matrices, watched_weights, weights_of
from course_lib.checking.on_ranks.given import Given
from course_lib.ranks import compute


def steps_inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Draw each rank's parameters of ``shapes``, and targets for each step, one of ``graphs``."""

    def draw() -> list[Tensor]:
        shapes = case.parameters["shapes"]
        return [torch.randn(shape, generator=generator, dtype=torch.double) for shape in shapes]

    made = []
    for rank in range(case.world_size):
        steps = matrices(case, rank)
        told = ("lr", "loss", "seconds", "unused", "before")
        options = {key: case.parameters[key] for key in told}
        targets = [draw() for _ in steps]
        made.append({"values": draw(), "targets": targets, "matrices": steps, **options})
    return made


def steps_program(step: Callable[..., Any], mine: Any, given: Given) -> dict[str, Any]:
    """Take a step with each of the case's matrices."""
    params = [torch.nn.Parameter(value.clone()) for value in mine["values"]]
    for param in params if mine["before"] else ():
        param.grad = torch.ones_like(param)
    memory, calls = [param.data_ptr() for param in params], []
    matrices = watched_weights(given, mine["matrices"], params[0])
    for targets, weights in zip(mine["targets"], matrices, strict=True):

        def used(targets: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
            calls.append("loss")
            compute(mine["seconds"])
            pairs = enumerate(zip(params, targets, strict=True))
            return [pair for i, pair in pairs if i != mine["unused"]]

        def distance(targets: list[Tensor] = targets) -> Any:
            return sum((p - t).square().sum() / 2 for p, t in used(targets))

        def product(targets: list[Tensor] = targets) -> Any:
            return sum((p * t).sum() for p, t in used(targets))

        loss = product if mine["loss"] == "product" else distance
        step(given.iterable(params), loss, mine["lr"], weights, group=given.group)
    return {
        "parameter {}": [param.detach().clone() for param in params],
        "calls of loss()": len(calls),
        "the parameters' own memory": [param.data_ptr() for param in params] == memory,
    }


def steps_computes(own: Any) -> dict[float, int]:
    """Return how long `steps_program` computes: once in each step."""
    return {own["seconds"]: len(own["matrices"])}


Step = Callable[[Tensor, Tensor, float, Callable[[Tensor], Tensor], Tensor], Tensor]
"""``step(W, X, γ, gradient, old)``: from all ranks' weights X, shape (K, n), to the next."""


def stepped(step: Step) -> Oracle:
    """Return the oracle of some steps of training; `old` is what ``.grad`` held before.

    Of the inputs, ``values`` are the parameters, ``targets`` one list of tensors for each step, and
    ``loss`` says how they make a loss: ``distance`` is half the squared distance of all parameters
    to them, ``product`` the sum of the products. Parameter ``unused`` is left out.
    """

    def oracle(case: Case, inputs: Sequence[Any], me: int) -> dict[str, Any]:
        graphs, mine = case.parameters["graphs"], inputs[me]
        shapes = [value.shape for value in mine["values"]]
        x = torch.stack([_flat(each["values"]) for each in inputs])
        used = [torch.full((s.numel(),), float(i != mine["unused"])) for i, s in enumerate(shapes)]
        old = torch.full_like(x, float(mine["before"]))
        for t, graph in enumerate(graphs):
            target = torch.stack([_flat(each["targets"][t]) for each in inputs])

            def gradient(x: Tensor, target: Tensor = target) -> Tensor:
                return torch.cat(used) * (target if mine["loss"] == "product" else x - target)

            new = step(weights_of(graph, len(inputs)), x, mine["lr"], gradient, old)
            old, x = old + gradient(x), new
        new_weights = x[me].to(mine["values"][0].dtype)
        pieces = torch.split(new_weights, [shape.numel() for shape in shapes])
        return {
            "calls of loss()": len(graphs),
            "parameter {}": [p.view(shape) for p, shape in zip(pieces, shapes, strict=True)],
            "the parameters' own memory": True,
        }

    return oracle


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.double().flatten() for tensor in tensors])


MISTAKES: dict[str, Step] = {
    "the weights as they were: write into the parameters": lambda w, x, lr, g, old: x,
    "W(w - γ g): the gradient must not be mixed": lambda w, x, lr, g, old: w @ (x - lr * g(x)),
    "γ times the gradient at the mixed weights: take it before mixing": (
        lambda w, x, lr, g, old: w @ x - lr * g(w @ x)
    ),
    "a step without mixing": lambda w, x, lr, g, old: x - lr * g(x),
    "mixing without a step": lambda w, x, lr, g, old: w @ x,
    "mixed gradients and the rank's own weights": lambda w, x, lr, g, old: x - lr * w @ g(x),
    "the mean over all ranks: hear neighbours only": lambda w, x, lr, g, old: (
        x.mean(0, keepdim=True) - lr * g(x)
    ),
    "mixing twice in a step": lambda w, x, lr, g, old: w @ w @ x - lr * g(x),
    "mixing without those of little weight: whoever's weight is not 0 is heard": (
        lambda w, x, lr, g, old: torch.where(w > 0.1, w, 0) @ x - lr * g(x)
    ),
    "a step uphill: the sign of the gradient is wrong": lambda w, x, lr, g, old: w @ x + lr * g(x),
    "a step with the learning rate 1": lambda w, x, lr, g, old: w @ x - g(x),
    "γ before the mean as well: it belongs to the gradient": lambda w, x, lr, g, old: (
        x + lr * (w @ x - x) - lr * g(x)
    ),
    "a gradient that was added to an older one: clear .grad before backward": (
        lambda w, x, lr, g, old: w @ x - lr * (g(x) + old)
    ),
    "mixing with a column of the matrix: row i is what rank i hears": lambda w, x, lr, g, old: (
        w.T @ x - lr * g(x)
    ),
}

equals_steps = equals(
    stepped(lambda w, x, lr, g, old: w @ x - lr * g(x)),
    {name: stepped(step) for name, step in MISTAKES.items()},
)
"""Judge the parameters after the steps, how often the loss was asked for, and their memory."""
