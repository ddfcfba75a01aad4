"""Report whether parameters keep their memory: a part of a program's answer, in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

OWN_MEMORY = "the memory of the parameters after the call"
"""Key in a program's answer; its value comes from `memory_of`."""
KEPT = "kept"
REPLACED = "replaced: write into the old memory, with p.data.copy_(new)"


def addresses(params: Iterable[Tensor]) -> list[int]:
    """Return the address of the first number of each parameter."""
    return [param.data_ptr() for param in params]


def memory_of(params: Iterable[Tensor], before: Sequence[int]) -> str:
    """Return `KEPT` if the parameters have the `addresses` of `before`, else `REPLACED`."""
    return KEPT if addresses(params) == before else REPLACED
