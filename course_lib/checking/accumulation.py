"""A gradient that is added up over micro-batches: inputs, program, judge.

Micro-batch j has b_j of the B rows and the mean gradient g_j; right is ``sum_j b_j/B g_j``. Nearly
every mistake is another choice of the factors, and so can be named when its numbers appear.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch

from course_lib.checking.cases import Case
from course_lib.checking.judges import Judge, Oracle, equals
from course_lib.checking.on_ranks.given import Given
from course_lib.checking.shared.training import (
    CLASSES,
    FEATURES,
    SHAPES,
    loss_of,
    make_model,
    mean_loss,
    targets_of,
)

AT_A_TIME = "micro-batches in memory at a time (backward() frees one)"

Factors = Callable[[Tensor, int], Tensor]
"""From the rows b_j of the micro-batches and their largest size to the factor of each."""


def share(rows: Tensor, micro: int) -> Tensor:
    """Each micro-batch counts with its rows: b_j / B."""
    return rows / rows.sum()


def last(rows: Tensor, micro: int) -> Tensor:
    """Only the last micro-batch counts."""
    return torch.eye(len(rows), dtype=rows.dtype)[-1]


MISTAKES: dict[str, Factors] = {
    "the plain mean over the micro-batches, though the last one has fewer rows": (
        lambda rows, micro: torch.ones_like(rows) / len(rows)
    ),
    "the sum over the micro-batches: weigh each with its share of the rows": (
        lambda rows, micro: torch.ones_like(rows)
    ),
    "the sum over all rows: the division by B is missing": lambda rows, micro: rows,
    "what the weight micro_batch_size / B gives, though the last one has fewer rows": (
        lambda rows, micro: torch.full_like(rows, micro) / rows.sum()
    ),
    "that of the last micro-batch: it has wiped out the others": last,
    "the last micro-batch's share: it has wiped out the others": (
        lambda rows, micro: last(rows, micro) * share(rows, micro)
    ),
    "the last micro-batch's part of a plain mean: it has wiped out the others": (
        lambda rows, micro: last(rows, micro) / len(rows)
    ),
}


def draw_rows(count: int, loss: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw rows and targets for the loss, a function of ``torch.nn.functional``."""
    x = torch.randn(count, FEATURES, generator=generator)
    y = torch.randn(count, CLASSES, generator=generator)
    return x, targets_of(loss, y)


def draw_model(case: Case, generator: torch.Generator) -> dict[str, Any]:
    """Draw the weights of a model, and what its ``.grad`` holds before anything is called.

    That is None if the case is ``fresh``.
    """
    weights = [0.3 * torch.randn(shape, generator=generator) for shape in SHAPES]
    before = [torch.randn(shape, generator=generator) for shape in SHAPES]
    fresh = case.parameters.get("fresh", False)
    return {"weights": weights, "before": [None] * len(before) if fresh else before}


def model_of(mine: Any) -> nn.Module:
    """Return the model with these weights and gradients."""
    model = make_model(mine["weights"])
    for param, gradient in zip(model.parameters(), mine["before"], strict=True):
        param.grad = None if gradient is None else gradient.clone()
    return model


def accumulation_inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Draw a model and rows for two calls.

    The case has ``rows``, a number per call, ``micro``, the rows of a micro-batch, and ``loss``.
    """
    loss = case.parameters["loss"]
    calls = [draw_rows(count, loss, generator) for count in case.parameters["rows"]]
    x, y = zip(*calls, strict=True)
    more = {"loss": loss, "micro": case.parameters["micro"]}
    return [{**draw_model(case, generator), "x": list(x), "y": list(y), **more}]


def accumulation_program(accumulate: Callable[..., Any], mine: Any, given: Given) -> Any:
    """Call ``accumulate(model, loss_fn, x, y, micro_batch_size)`` twice, and watch its rows."""
    seen: list[Any] = []
    graphs: list[Any] = []
    most = 0

    # On the layers and not on the model: whoever goes through them one by one is seen as well.
    def watch_rows(_: nn.Module, arguments: Any) -> None:
        rows = _untransformed(arguments[0])
        transformed = _functorch.peek_interpreter_stack() is not None  # no number can be looked at
        seen.append((rows, x) if transformed else _row_numbers(rows, x))

    def watch_graph(_: nn.Module, arguments: Any, output: Tensor) -> None:
        nonlocal most
        graphs[:] = [graph for graph in graphs if not _is_freed(graph)]
        transformed = _untransformed(output) is not output
        if transformed or output.requires_grad:
            most = max(most, len(graphs) + 1)
        if not transformed and output.requires_grad:
            graphs.append(output.grad_fn)

    module, loss_fn = model_of(mine), loss_of(mine["loss"])
    first, *_, last = module.children()
    first.register_forward_pre_hook(watch_rows)
    last.register_forward_hook(watch_graph)
    model = given.model(module)
    losses = []
    for x, y in zip(mine["x"], mine["y"], strict=True):
        losses.append(accumulate(model, loss_fn, x, y, mine["micro"]))
    return {
        "parameter {} after the call": [param.detach() for param in model.parameters()],
        "gradient of parameter {}": [param.grad for param in model.parameters()],
        "loss returned by call {}": losses,
        "rows of forward pass {}": [
            each if isinstance(each, Tensor) else _row_numbers(*each) for each in seen
        ],
        AT_A_TIME: most,
    }


def _row_numbers(rows: Tensor, x: Tensor) -> Tensor:
    """Return which rows of x these are; -1 for what is none of them."""
    same = (rows.detach().reshape(-1, 1, x.shape[-1]) == x[None]).all(-1)
    return torch.where(same.any(1), same.int().argmax(1), -1)


def _untransformed(tensor: Tensor) -> Tensor:
    """Return the tensor that a transformation of ``torch.func`` has wrapped, or the tensor."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def _is_freed(graph: Any) -> bool:
    """Return whether backward has freed what the last layer saved for it."""
    try:
        return graph._saved_mat1 is None
    except RuntimeError:
        return True


def equals_accumulated(**options: Any) -> Judge:
    """Judge what `accumulation_program` returns by one backward pass over all rows.

    Args:
        **options: of `equals`.

    """
    mistakes = {name: _oracle(factors, factors) for name, factors in MISTAKES.items()}
    mistakes["the right gradient, added to what was there before"] = _oracle(carry=1.0)
    return equals(_oracle(), mistakes, **options)


def _oracle(gradient: Factors = share, loss: Factors = share, carry: float = 0.0) -> Oracle:
    """Return what these factors give; `carry` times what was there before is still in it."""

    def oracle(case: Case, inputs: Any, me: int) -> Any:
        mine = inputs[0]
        model = make_model([weight.double() for weight in mine["weights"]])
        held: list[Any] = [0.0 if g is None else g.double() for g in mine["before"]]
        losses, numbers = [], []
        for x, y in zip(mine["x"], mine["y"], strict=True):
            parts = list(zip(x.split(mine["micro"]), y.split(mine["micro"]), strict=True))
            rows = torch.tensor([len(part) for part, _ in parts], dtype=torch.float64)
            means = [mean_loss(model, mine["loss"], *part) for part in parts]
            grads = [torch.autograd.grad(mean, list(model.parameters())) for mean in means]
            factors = gradient(rows, mine["micro"])
            for i in range(len(held)):
                mixed = sum(f * g[i] for f, g in zip(factors, grads, strict=True))
                held[i] = mixed + carry * held[i]
            scalars = loss(rows, mine["micro"]).tolist()
            losses.append(sum(f * m.item() for f, m in zip(scalars, means, strict=True)))
            numbers += [
                torch.arange(len(x))[i : i + mine["micro"]] for i in range(0, len(x), mine["micro"])
            ]
        dtype = mine["weights"][0].dtype
        return {
            "parameter {} after the call": mine["weights"],
            "gradient of parameter {}": [each.to(dtype) for each in held],
            "loss returned by call {}": losses,
            "rows of forward pass {}": numbers,
            AT_A_TIME: 1,
        }

    return oracle
