"""What a program says of parameters' memory: it is part of the answer, in words for a person."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

OWN_MEMORY = "the memory of the parameters after the call"
"""Key of a program's answer; its value is `memory_of`."""
KEPT = "kept"
REPLACED = "replaced: write into the old memory, with p.data.copy_(new)"


def addresses(params: Iterable[Tensor]) -> list[int]:
    """Return where the numbers of each parameter begin."""
    return [param.data_ptr() for param in params]


def memory_of(params: Iterable[Tensor], before: Sequence[int]) -> str:
    """Return `KEPT` if the parameters are where they were, else `REPLACED`."""
    return KEPT if addresses(params) == list(before) else REPLACED
