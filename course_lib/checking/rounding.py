"""How much error the arithmetic of a case allows: what a right answer may differ by.

A sum in another order, or with one rounding more, is also right, and where large terms cancel its
error is far larger than a fixed share of the small result. So the allowed error comes from the
case: the oracle is computed in float64 several times, each time from inputs whose numbers are moved
at random by one rounding of the dtype. The results differ by what roundings do to this case. This
is Monte Carlo arithmetic (Parker, Pierce and Eggert, 2000).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from course_lib.checking.on_ranks.leaves import leaves

SAMPLES = 16
ROUNDINGS = 8
"""Roundings in a row that a right computation may make beyond those that an input goes through."""


def rounding_errors(
    right: Callable[[Sequence[Any]], Any], inputs: Sequence[Any], dtype: torch.dtype
) -> dict[str, float]:
    """Return the absolute error that a right answer may have at each of its places.

    Args:
        right: the right answer for some inputs. It is called with inputs in float64.
        inputs: the inputs of the members of a group.
        dtype: the dtype in which a right computation rounds.

    Returns:
        A name as in `wire.leaves` → `ROUNDINGS` times the largest difference in this tensor. One
        number for a whole tensor, because intermediate results are shared by its elements.

    """
    generator = torch.Generator().manual_seed(0)
    unit = torch.finfo(dtype).eps / 2
    exact = dict(leaves(right(_moved(inputs, 0.0, generator))))
    errors = dict.fromkeys(exact, 0.0)
    for _ in range(SAMPLES):
        for place, value in leaves(right(_moved(inputs, unit, generator))):
            if place in exact:
                errors[place] = max(errors[place], _distance(value, exact[place]))
    return {place: ROUNDINGS * error for place, error in errors.items()}


def _moved(value: Any, unit: float, generator: torch.Generator) -> Any:
    """Return the inputs in float64, each number times 1 + unit or 1 - unit."""
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            return value
        signs = torch.randint(2, value.shape, generator=generator, dtype=torch.int8) * 2 - 1
        return value.double() * (1 + unit * signs)
    if isinstance(value, dict):
        return {key: _moved(item, unit, generator) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_moved(item, unit, generator) for item in value)
    return value


def _distance(value: Any, exact: Any) -> float:
    if isinstance(value, Tensor) and isinstance(exact, Tensor):
        if value.shape != exact.shape or not value.is_floating_point() or not value.numel():
            return 0.0
        return float((value.double() - exact.double()).abs().nan_to_num().max())
    number = isinstance(value, float) and isinstance(exact, float)
    return abs(value - exact) if number else 0.0
