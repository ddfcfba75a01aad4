"""Sums of tensors over ranks: exact numbers, and judges that know what people get instead.

All numbers are such that no sum of them is rounded, in whatever order it is taken. So every answer
must be exact, in every dtype, and one that went through another dtype is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from course_lib.checking.cases import Case
from course_lib.checking.judges import Judge, Oracle, equals

EXACT = dict.fromkeys(("float32", "float64", "bfloat16", "int64"), 0.0)
"""dtype → allowed relative error."""

_Of = Callable[[Sequence[Any], int], Tensor]
"""From the inputs of a group and the number of a member to its tensor."""


def exact_numbers(case: Case, generator: torch.Generator, shape: Sequence[int]) -> Tensor:
    """Draw multiples of a power of two: the dtype holds them, and their sums over 8 ranks."""
    bits, unit = {"bfloat16": (4, 1.0), "float32": (16, 2.0**-8)}.get(
        case.form.dtype, (40, 2.0**-20)
    )
    numbers = torch.randint(-(2**bits), 2**bits, tuple(shape), generator=generator).double()
    return numbers if case.form.dtype == "int64" else numbers * unit


def tensor_inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Draw a ``tensor`` of the case's ``shape`` for every rank."""
    shape = case.parameters["shape"]
    return [{"tensor": exact_numbers(case, generator, shape)} for _ in range(case.world_size)]


def numel(case: Case) -> int:
    """Return how many numbers a tensor of such a case has."""
    return torch.Size(case.parameters["shape"]).numel()


def total(inputs: Sequence[Any]) -> Tensor:
    """Return the sum over the members of a group."""
    return torch.stack([each["tensor"] for each in inputs]).sum(0)


def chunk(tensor: Tensor, k: int, number: int) -> Tensor:
    """Return one of the K chunks of the flattened tensor; the first ones are longer by one."""
    return tensor.flatten().tensor_split(k)[number % k]


MISTAKES: dict[str, _Of] = {
    "what this rank had before: nothing was written into it": lambda ins, me: ins[me]["tensor"],
    "K times what this rank had: what arrives is never used": lambda ins, me: (
        len(ins) * ins[me]["tensor"]
    ),
    "the sum over this rank and its left neighbour only": lambda ins, me: (
        ins[me]["tensor"] + ins[me - 1]["tensor"]
    ),
    "the mean: nobody asked to divide": lambda ins, me: (total(ins) / len(ins)).to(
        ins[me]["tensor"].dtype
    ),
    "twice the sum": lambda ins, me: 2 * total(ins),
    "the right sum, rounded to float32: keep the tensor's dtype": lambda ins, me: total(
        [{"tensor": each["tensor"].float()} for each in ins]
    ).to(ins[me]["tensor"].dtype),
}


def equals_sum(mistakes: dict[str, Oracle] | None = None) -> Judge:
    """Judge ``{"tensor": …}`` by the sum over the group.

    Args:
        mistakes: more of them, named first; see `equals`.

    """
    known = {name: _tensor(of) for name, of in MISTAKES.items()}
    return equals(
        _tensor(lambda ins, me: total(ins)), {**(mistakes or {}), **known}, tolerance=EXACT
    )


def equals_chunk_of_sum() -> Judge:
    """Judge ``{"chunk": …}`` by the chunk with the member's own number of the sum."""
    known = {
        "chunk r + 1 of the sum: number r keeps chunk r": _chunk(lambda ins, me: total(ins), +1),
        "chunk r - 1 of the sum: number r keeps chunk r": _chunk(lambda ins, me: total(ins), -1),
        **{name: _chunk(of) for name, of in MISTAKES.items()},
    }
    return equals(_chunk(lambda ins, me: total(ins)), known, tolerance=EXACT)


def _tensor(of: _Of) -> Oracle:
    return lambda case, inputs, me: {"tensor": of(inputs, me)}


def _chunk(of: _Of, distance: int = 0) -> Oracle:
    return lambda case, inputs, me: {
        "chunk": chunk(of(inputs, me), len(inputs), me + distance),
    }
