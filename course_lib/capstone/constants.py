"""Numbers that a rank brings along: no operator made them, and few of them are allowed.

There are two ways for them on a tape, and both are counted here: memory with numbers in it, as of
``torch.tensor([…])``, and the line of an operator. The latter may name numbers (arguments, lists of
scalars, sizes) and tensors, which may be views of one table in an order of somebody's choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from course_lib.capstone.tape import TapeError

MAX_CONSTANT = 8_192
"""Bytes of all constants of one rank: indices and masks, not weights."""
FREE_NAMES = 32
"""So many numbers and tensors an operator may name for nothing: it pays for them with its launch.
Each one more is eight bytes. A fused Adam of four parameters names 30."""
_FREE_SIZES = 4
"""Of a tensor; each one more, with its stride, is a number."""


class Constants:
    """What one rank has brought along so far.

    Attributes:
        nbytes: bytes of it.

    """

    def __init__(self) -> None:
        self.nbytes = 0

    def take(self, nbytes: int) -> bool:
        """Count memory; return whether there may be so much."""
        self.nbytes += nbytes
        return self.nbytes <= MAX_CONSTANT

    def take_memory(self, nbytes: int, where: str) -> None:
        """Count memory.

        Raises:
            TapeError: there may not be so much.

        """
        before = self._before()
        if not self.take(nbytes):
            at = f" ({where[:80]})" if where else ""
            raise TapeError(
                f"{nbytes:,} bytes come from nowhere{at}{before}: no operator on the tape made "
                f"them, and there may be {MAX_CONSTANT:,} such bytes in all. NumPy, files, other "
                "threads and numbers from home are not on the tape; torch.randperm and "
                "torch.randint are"
            )

    def take_line(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Count what an operator's line names.

        Args:
            name: of the operator.
            args: as the tape tells them.
            kwargs: likewise.

        Raises:
            TapeError: there may not be so much.

        """
        names = sum(map(_names, args)) + sum(map(_names, kwargs.values()))
        if names <= FREE_NAMES:
            return
        nbytes, before = 8 * (names - FREE_NAMES), self._before()
        if not self.take(nbytes):
            raise TapeError(
                f"{name[:60]} names {names:,} numbers and tensors. All above {FREE_NAMES} count as "
                f"numbers that come from nowhere, {nbytes:,} bytes{before}, and there may be "
                f"{MAX_CONSTANT:,} such bytes in all: have many numbers made by operators, and "
                "keep them in one tensor"
            )

    def _before(self) -> str:
        return f", after {self.nbytes:,} others" if self.nbytes else ""


def _names(told: Any) -> int:
    match told:
        case int() | float():
            return 1
        case ["t", _, _, list(size), *_]:
            return 1 + max(0, len(size) - _FREE_SIZES)
        case ["l", *items]:
            return sum(map(_names, items))
    return 0
