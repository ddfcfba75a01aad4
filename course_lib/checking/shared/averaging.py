"""Inputs, program and judge of tasks that average gradients over ranks.

A wrong average is a wrong mixture. Member k of a group should hold ``sum_j M[k, j] v_j``, where v_j
is the value of member j. Nearly every mistake that people make gives a different matrix M, so the
mistake can be named when its numbers appear.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.checking.answers import Judge
from course_lib.checking.cases import Case
from course_lib.checking.judges import Oracle, equals
from course_lib.checking.on_ranks.given import Given

Matrix = Callable[[Tensor], Tensor]
"""A function from the members' numbers of rows, shape (K,), to the mixture, shape (K, K)."""


def mean(rows: Tensor) -> Tensor:
    """Return the mixture in which all members have the same weight: 1/K."""
    return torch.ones_like(rows.outer(rows)) / len(rows)


def by_rows(rows: Tensor) -> Tensor:
    """Return the mixture in which a member's weight is its share of the rows: B_j / B."""
    return (rows / rows.sum()).expand(len(rows), -1)


def own(rows: Tensor) -> Tensor:
    """Return the mixture in which every member holds its own value: the identity."""
    return torch.eye(len(rows), dtype=rows.dtype)


MISTAKES: dict[str, Matrix] = {
    "the sum over the ranks, not the mean": lambda rows: len(rows) * mean(rows),
    "this rank's own gradient: nothing was averaged": own,
    "this rank's own gradient divided by the number of ranks: the sum did not arrive here (reduce "
    "gives the sum to one rank, all_reduce to all ranks)": lambda rows: own(rows) / len(rows),
    "the mean divided by the number of ranks a second time": lambda rows: mean(rows) / len(rows),
}


def equals_mean(of: str, words: str, **options: Any) -> Judge:
    """Return a judge that compares a list of tensors with their means over the group.

    Args:
        of: key of the input whose tensors are averaged; None in the list stays None.
        words: key of the value that holds the means. The report uses the key as words: ``{}``
            stands for the position, as in ``gradient of parameter {}``.
        **options: options of `equals`.

    """

    def mixed(matrix: Matrix) -> Oracle:
        def oracle(case: Case, inputs: Sequence[Any], me: int) -> Any:
            row = matrix(torch.ones(len(inputs), dtype=torch.float64))[me]
            doubles = inputs[me].get("doubles", ())
            means: list[Any] = []
            for i, values in enumerate(zip(*(each[of] for each in inputs), strict=True)):
                if values[0] is None:
                    means.append(None)
                    continue
                total = sum(
                    m * value.double() if m else torch.zeros_like(value, dtype=torch.float64)
                    for m, value in zip(row, values, strict=True)
                )
                assert isinstance(total, Tensor)
                means.append(total if i in doubles else total.to(values[0].dtype))
            return {words: means}

        return oracle

    def of_this_form(case: Case, inputs: Sequence[Any], me: int) -> Any:
        words = unchanged_in_this_form(case, "this rank's own gradient", "mean")
        return dict.fromkeys(words, mixed(own)(case, inputs, me))

    mistakes = {name: mixed(matrix) for name, matrix in MISTAKES.items()}
    return equals(mixed(mean), mistakes, named=of_this_form, **options)


def unchanged_in_this_form(case: Case, value: str, result: str) -> list[str]:
    """Return why a form such as the case's may leave an old `value`, without the new `result`."""
    words = []
    if case.form.layout in case.name:
        words.append(
            f"{value}: it is {case.form.layout}, so .flatten(), .reshape() and .contiguous() make "
            f"a copy, and the {result} went into the copy"
        )
    if case.form.iterable == "generator":
        words.append(
            f"{value}: the parameters come from a generator here, so a second loop over them finds "
            "none"
        )
    return words


def gradient_inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Draw the same weights for every rank, and different gradients.

    The case has ``shapes``, one per parameter, and may have ``frozen``, the positions of parameters
    that have no gradient on any rank, ``doubles``, the positions of parameters of dtype float64,
    ``large``, a factor of the gradients, ``zero``, a rank whose gradients are zero, and
    ``overflown``, a rank whose first gradients have an inf.
    """
    p = case.parameters
    shapes, frozen = p["shapes"], p.get("frozen", ())

    def draw() -> list[Tensor]:
        return [torch.randn(shape, generator=generator) for shape in shapes]

    weights, drawn = draw(), []
    for rank in range(case.world_size):
        gradients = [p.get("large", 1) * (rank != p.get("zero")) * each for each in draw()]
        if rank == p.get("overflown"):
            gradients[0].view(-1)[0] = torch.inf
        kept = [None if i in frozen else g for i, g in enumerate(gradients)]
        doubles = list(p.get("doubles", ()))
        drawn.append({"weights": weights, "gradients": kept, "doubles": doubles})
    return drawn


def gradient_program(average: Callable[..., Any], mine: Any, given: Given) -> Any:
    """Call ``average(params, group=group)`` with these gradients; return the gradients after it."""
    params = []
    for i, (weight, gradient) in enumerate(zip(mine["weights"], mine["gradients"], strict=True)):
        params.append(nn.Parameter(weight, requires_grad=gradient is not None))
        if i in mine["doubles"]:
            params[-1].data = weight.double()
            gradient = None if gradient is None else gradient.double()
        params[-1].grad = gradient
    given.watch.add_parameters("the parameters", params)
    average(given.iterable(params), group=given.group)
    return {"gradient of parameter {}": [param.grad for param in params]}


def gradient_count(case: Case, rank: int) -> int:
    """Return how many gradients a rank of such a case has."""
    return len(case.parameters["shapes"]) - len(case.parameters.get("frozen", ()))


def gradient_bytes(case: Case, rank: int) -> int:
    """Return how many bytes the gradients of a rank have together."""
    frozen, doubles = (case.parameters.get(key, ()) for key in ("frozen", "doubles"))
    return sum(
        (8 if i in doubles else case.itemsize) * torch.Size(shape).numel()
        for i, shape in enumerate(case.parameters["shapes"])
        if i not in frozen
    )


def flat_bytes(case: Case, rank: int) -> int:
    """Return the bytes of all gradients in one vector: torch.cat of two dtypes gives float64."""
    wide = 8 if case.parameters.get("doubles") else case.itemsize
    return gradient_bytes(replace(case, parameters={**case.parameters, "doubles": ()}), rank) * (
        wide // case.itemsize
    )


def unless_alone(limit: Callable[[Case, int], int]) -> Callable[[Case, int], int]:
    """Return the limit, changed to 0 for a rank that is alone in its group."""
    return lambda case, rank: limit(case, rank) if len(case.members(rank)) > 1 else 0
