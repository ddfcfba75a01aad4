"""Count the constants of a rank: numbers that no operator made. Only a few are allowed.

Constants get onto a tape in two ways, and both are counted here: as memory that already contains
numbers, such as ``torch.tensor([…])``, and in the line of an operator. The line of an operator may
name numbers (arguments, lists of scalars, sizes) and tensors. Tensors count too, because they may
be views of one table in a chosen order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from course_lib.capstone.tape import TapeError

MAX_CONSTANT = 8_192
"""Bytes of all constants of one rank: enough for indices and masks, but not for weights."""
FREE_NAMES = 32
"""An operator may name this many numbers and tensors for free, because its launch pays for them.
Each further one counts as eight bytes. A fused Adam of four parameters names 30."""
_FREE_SIZES = 4
"""Free dimensions of a tensor; each further dimension, with its stride, counts as a number."""


class Constants:
    """The constants of one rank so far.

    Attributes:
        nbytes: their size in bytes.

    """

    def __init__(self) -> None:
        self.nbytes = 0

    def take(self, nbytes: int) -> bool:
        """Count memory; return whether the total is allowed."""
        self.nbytes += nbytes
        return self.nbytes <= MAX_CONSTANT

    def take_memory(self, nbytes: int, where: str) -> None:
        """Count memory, and raise if the total is more than allowed.

        Raises:
            TapeError: the total is more than `MAX_CONSTANT`.

        """
        before = self._before()
        if not self.take(nbytes):
            at = f" ({where[:80]})" if where else ""
            raise TapeError(
                f"{nbytes:,} bytes come from nowhere{at}{before}: no operator on the tape made "
                f"them, and only {MAX_CONSTANT:,} such bytes are allowed in all. Numbers from "
                "NumPy, files, other threads or earlier work are not on the tape. Numbers from "
                "torch.randperm and torch.randint are on it"
            )

    def take_line(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Count the numbers and tensors in an operator's line.

        Args:
            name: the operator's name.
            args: its arguments, as on the tape.
            kwargs: its keyword arguments, as on the tape.

        Raises:
            TapeError: the total is more than `MAX_CONSTANT`.

        """
        names = sum(map(_names, args)) + sum(map(_names, kwargs.values()))
        if names <= FREE_NAMES:
            return
        nbytes, before = 8 * (names - FREE_NAMES), self._before()
        if not self.take(nbytes):
            raise TapeError(
                f"{name[:60]} gets {names:,} numbers and tensors as arguments. Those beyond the "
                f"first {FREE_NAMES} count as numbers that come from nowhere: {nbytes:,} "
                f"bytes{before}. Only {MAX_CONSTANT:,} such bytes are allowed in all: make many "
                "numbers with operators, and keep them in one tensor"
            )

    def _before(self) -> str:
        return f", after {self.nbytes:,} other such bytes" if self.nbytes else ""


def _names(told: Any) -> int:
    match told:
        case int() | float():
            return 1
        case ["t", _, _, list(size), *_]:
            return 1 + max(0, len(size) - _FREE_SIZES)
        case ["l", *items]:
            return sum(map(_names, items))
    return 0
