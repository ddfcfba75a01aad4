"""What one look at the machine has found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Need = Literal["course", "grading", "nothing"]


@dataclass(frozen=True)
class Finding:
    """Something of the machine, and whether it is fine.

    Attributes:
        name: of what was looked at.
        told: what is there, in one line.
        advice: what to do, in one sentence; empty: it is fine.
        needed_for: what does not work without; ``nothing``: less comfort, or less speed.

    """

    name: str
    told: str
    advice: str = ""
    needed_for: Need = "course"

    @property
    def fine(self) -> bool:
        """Whether there is nothing to do."""
        return not self.advice
