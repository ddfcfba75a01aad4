"""Muon, with each matrix orthogonalised on one rank: inputs, program, judge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.checking import Case, Expectation, Given, Observed, Wrong, equals, same_on_all_ranks
from course_lib.checking.answers import ANYTHING, WHOLE, ListOf
from course_lib.checking.judges import Oracle
from course_lib.checking.shared.training import looking_at
from course_lib.ranks import Trace
from course_lib.ranks.explain.words import counted

PARAMETER, MOMENTUM = "parameter {} after the last step", "momentum {} after the last step"
CALLS = "calls of newton_schulz"


def muon_inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Draw weights, momenta and the gradients of each step: the same for all ranks of a group.

    The case has ``shapes``, ``lrs`` (the learning rate of each step), ``beta``, and ``owners``: for
    each parameter the member of a group that owns it, or None if it is no matrix or is frozen. It
    may have ``frozen``, positions of parameters that have no gradient.
    """
    p = case.parameters

    def draw() -> list[Tensor]:
        return [torch.randn(shape, generator=generator) for shape in p["shapes"]]

    of_group = {
        members: {
            "weights": draw(),
            "momenta": draw(),
            "gradients": [
                [None if i in p.get("frozen", ()) else g for i, g in enumerate(draw())]
                for _ in p["lrs"]
            ],
            "lrs": list(p["lrs"]),
            "beta": p["beta"],
        }
        for members in case.groups
    }
    return [of_group[case.members(rank)] for rank in range(case.world_size)]


def newton_schulz(matrix: Tensor) -> Tensor:
    """Return about U @ V.T for the matrix U @ S @ V.T (Jordan, 2024), in five steps."""
    if matrix.dim() != 2:
        raise ValueError(f"newton_schulz got a tensor of shape {list(matrix.shape)}, not a matrix")
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram) @ x
    return x.T if tall else x


def muon_program(muon_step: Callable[..., Any], mine: Any, given: Given) -> Any:
    """Take all steps; return parameters, momenta, and which matrices this rank orthogonalised."""
    params = [nn.Parameter(w) for w in mine["weights"]]
    momenta = dict(zip(params, mine["momenta"], strict=True))
    shapes: list[list[int]] = []

    def counted(matrix: Tensor) -> Tensor:
        shapes.append(list(matrix.shape))
        return newton_schulz(matrix)

    for gradients, lr in zip(mine["gradients"], mine["lrs"], strict=True):
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
        muon_step(given.iterable(params), momenta, lr, mine["beta"], counted, group=given.group)
    return {
        PARAMETER: [param.detach() for param in params],
        MOMENTUM: [momenta[param] for param in params],
        CALLS: shapes,
    }


def muon(direction: Callable[[Tensor, Tensor], Tensor]) -> Oracle:
    """Return the oracle of plain Muon on one process, right or with a mistake.

    Args:
        direction: ``direction(momentum, gradient)`` of a matrix's update.

    """

    def oracle(case: Case, inputs: Sequence[Any], me: int) -> Any:
        mine = inputs[me]
        weights, momenta = ([each.double() for each in mine[k]] for k in ("weights", "momenta"))
        for gradients, lr in zip(mine["gradients"], mine["lrs"], strict=True):
            for i, gradient in enumerate(gradients):
                if gradient is None:
                    continue
                momenta[i] = mine["beta"] * momenta[i] + gradient.double()
                is_matrix = gradient.dim() == 2
                step = direction(momenta[i], gradient.double()) if is_matrix else momenta[i]
                weights[i] = weights[i] - lr * step
        dtype = mine["weights"][0].dtype
        return {
            PARAMETER: [each.to(dtype) for each in weights],
            MOMENTUM: [each.to(dtype) for each in momenta],
        }

    return oracle


def scaled(matrix: Tensor) -> Tensor:
    """Return the update of Liu et al. (2025), whose numbers are about as large as Adam's."""
    return 0.2 * max(matrix.shape) ** 0.5 * newton_schulz(matrix)


MUON_MISTAKES: dict[str, Oracle] = {
    "a step along the orthogonalised gradient: orthogonalise the momentum": muon(
        lambda momentum, gradient: scaled(gradient)
    ),
    "a step without the factor 0.2 · √max(rows, columns)": muon(
        lambda momentum, gradient: newton_schulz(momentum)
    ),
}

_KEYS = ("parameter", "momentum")
_FORM = {PARAMETER: ANYTHING, MOMENTUM: ANYTHING, CALLS: ListOf([WHOLE, WHOLE])}

right_muon = replace(
    looking_at(_KEYS, equals(muon(lambda m, g: scaled(m)), MUON_MISTAKES)), form=_FORM
)
same_step = looking_at(_KEYS, same_on_all_ranks)


# Expectations of the communication ------------------------------------------------------------


@Expectation
def on_its_owner(case: Case, observed: Observed, trace: Trace) -> None:
    """Expect each matrix to be orthogonalised once in each step, on the rank that owns it."""
    shapes, steps = case.parameters["shapes"], len(case.parameters["lrs"])
    for members in case.groups:
        for me, rank in enumerate(members):
            alone = len(members) == 1
            owned = [
                list(shape)
                for shape, owner in zip(shapes, case.parameters["owners"], strict=True)
                if owner is not None and (alone or owner == me)
            ]
            expected = sorted(owned * steps)
            called = sorted(observed.outputs[rank]["value"][CALLS])
            if called != expected:
                raise Wrong(
                    f"in {counted(steps, 'step')}, rank {rank} calls newton_schulz "
                    f"{_times(called)}, expected {_times(expected)}",
                    "A matrix is orthogonalised once in each step, on its owner. The largest "
                    "matrix comes first, and the owner is the rank that has the fewest elements.",
                )


def _times(shapes: Sequence[Sequence[int]]) -> str:
    each = {tuple(shape): shapes.count(shape) for shape in shapes}
    words = [f"{n} × with {a} by {b}" for (a, b), n in each.items()]
    return ", ".join(words) or "never"


def muon_calls(case: Case, rank: int) -> int:
    """Return the number of collectives: one for each step."""
    return len(case.parameters["lrs"])


def matrix_bytes(case: Case, rank: int) -> int:
    """Return the bytes of all matrices, in all steps."""
    pairs = zip(case.parameters["shapes"], case.parameters["owners"], strict=True)
    elements = sum(torch.Size(shape).numel() for shape, owner in pairs if owner is not None)
    return muon_calls(case, rank) * case.itemsize * elements
