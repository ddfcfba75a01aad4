"""What rounding allows: how far a right value may be from the reference's, by arithmetic.

A right answer is not always exact. A sum in another order is also right, or one with one rounding
more. If large terms cancel, its error is far larger than a fixed share of the small result. So the
reference runs in float64, and again with inputs whose numbers are moved at random by one rounding
of the case's dtype. The results differ by what roundings do to this case. This is Monte Carlo
arithmetic (Parker, Pierce and Eggert, 2000). Every second time the numbers of a tensor move
together, as they do if a rank's own sum or mean is rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from course_lib.checking.on_ranks.leaves import leaves, with_tensors

SAMPLES = 8
"""Runs with moved inputs."""
ROUNDINGS = 16
"""Roundings in a row that a right computation may make beyond those that an input goes through."""
_FLOAT32 = torch.finfo(torch.float32).eps / 2
_FAR = 2.0**10
"""In float64 one rounding more would vanish in the arithmetic, so inputs move by so many."""


def as_dtype(drawn: Tensor, dtype: torch.dtype) -> Tensor:
    """Return drawn numbers in the case's dtype; for a half precision, numbers whose sums are exact.

    So right answers are near each other in every order of the additions, and wrong ones are far.
    """
    if not drawn.is_floating_point() or not dtype.is_floating_point:
        return drawn
    converted = drawn.to(dtype)
    half = dtype in (torch.bfloat16, torch.float16)
    changed = half and bool((converted != drawn).logical_and(~drawn.isnan()).any())
    return _coarse(drawn).to(dtype) if changed else converted


def _coarse(drawn: Tensor) -> Tensor:
    """Return the numbers in multiples of a sixteenth of the power of two above the largest one."""
    _, exponent = torch.frexp(drawn[drawn.isfinite()].abs().max())
    unit = 2.0 ** (int(exponent) - 4)
    return (drawn / unit).round() * unit


def moved_inputs(inputs: Sequence[Any], dtype: str) -> list[Any]:
    """Return inputs in float64: as they are, then `SAMPLES` times moved by a rounding."""
    generator = torch.Generator().manual_seed(0)
    unit = torch.finfo(getattr(torch, dtype)).eps / 2 * _far(dtype)

    def moved(tensor: Tensor, by: float, together: bool) -> Tensor:
        if not tensor.is_floating_point():
            return tensor.clone()
        shape = () if together else tensor.shape
        signs = torch.randint(2, shape, generator=generator).double() * 2 - 1
        return tensor.double() * (1 + by * signs)

    moves = [(0.0, False), *((unit, bool(n % 2)) for n in range(SAMPLES))]
    return [with_tensors(list(inputs), partial(moved, by=by, together=t)) for by, t in moves]


def bounds_from(value: Any, sampled: Sequence[Any], dtype: str) -> dict[str, float]:
    """Return a name as in `leaves` → the error that a right value may have there.

    Args:
        value: what the reference gives in the case's dtype.
        sampled: what it gives for `moved_inputs`.
        dtype: the dtype in which a right computation rounds.

    Returns:
        One number for a whole tensor, because its elements share intermediate results.

    """
    unit = torch.finfo(getattr(torch, dtype)).eps / 2
    exact, *moved = (dict(leaves(sample)) for sample in sampled)
    bounds = {}
    for place, rounded in leaves(value):
        if place not in exact:
            continue
        # A number, such as a loss, may have been added up in a tensor of PyTorch's default dtype.
        own_unit = max(unit, _FLOAT32) if isinstance(rounded, float) else unit
        error = own_unit * _size(exact[place])
        for run in moved:
            error = max(error, _distance(run.get(place), exact[place]) / _far(dtype))
        bounds[place] = ROUNDINGS * error + _distance(rounded, exact[place])
    return bounds


def _far(dtype: str) -> float:
    return _FAR if dtype == "float64" else 1.0


def _numbers(value: Any) -> Tensor:
    """Return a float or a floating-point tensor in float64, and of anything else no numbers."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    return torch.tensor(value if isinstance(value, float) else [], dtype=torch.float64)


def _size(value: Any) -> float:
    """Return the largest absolute value that is finite."""
    numbers = _numbers(value).nan_to_num(0, 0, 0)
    return float(numbers.abs().max()) if numbers.numel() else 0.0


def _distance(value: Any, exact: Any) -> float:
    a, b = _numbers(value), _numbers(exact)
    return _size(a - b) if a.shape == b.shape else 0.0
