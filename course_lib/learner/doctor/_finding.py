"""The result of one test of the machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Need = Literal["course", "nothing"]


@dataclass(frozen=True)
class Finding:
    """One property of the machine, and whether it is fine.

    Attributes:
        name: the name of what was tested.
        told: what was found, in one line.
        advice: what to do, in one sentence; empty if all is fine.
        needed_for: what does not work without it. With ``nothing``, only comfort or speed suffers.

    """

    name: str
    told: str
    advice: str = ""
    needed_for: Need = "course"

    @property
    def fine(self) -> bool:
        """Whether there is nothing to do."""
        return not self.advice
