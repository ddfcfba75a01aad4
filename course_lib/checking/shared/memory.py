"""What a program says of the memory of parameters, and the mistake that shows there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from course_lib.checking.cases import Case

OWN_MEMORY = "the parameters' own memory"
"""Key of a program's answer: whether the parameters are where they were."""


def addresses(params: Iterable[Tensor]) -> list[int]:
    """Return where the numbers of each parameter begin."""
    return [param.data_ptr() for param in params]


def _moved(case: Case, inputs: Sequence[Any], me: int) -> dict[str, Any]:
    return {OWN_MEMORY: False}


MOVED = {
    "what p.data = … does: others still look at the old memory. Write into it, p.data.copy_(…)": (
        _moved
    )
}
"""Words → oracle, for `equals`."""
