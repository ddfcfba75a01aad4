"""Report whether parameters keep their memory: a part of a program's answer, in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

OWN_MEMORY = "the memory of the parameters after the call"
"""Key in a program's answer; its value comes from `memory_of`."""
KEPT = "kept"
REPLACED = "replaced: write into the old memory, with p.data.copy_(new)"
CHANGED = "kept, but requires_grad is changed: leave it as it is"


def addresses(params: Iterable[Tensor]) -> list[tuple[int, bool]]:
    """Return the address of the first number of each parameter, and its ``requires_grad``."""
    return [(param.data_ptr(), param.requires_grad) for param in params]


def memory_of(params: Iterable[Tensor], before: Sequence[tuple[int, bool]]) -> str:
    """Return `KEPT` if the parameters have the `addresses` of `before`, else what is changed."""
    after = addresses(params)
    if [address for address, _ in after] != [address for address, _ in before]:
        return REPLACED
    return KEPT if after == list(before) else CHANGED
