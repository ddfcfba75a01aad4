"""How submissions are examined: one list of options, for nbgrader's pass and for the pool."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from traitlets.config import Config

ATTEMPTS = 3
"""A submission that the machine failed is tried so many times."""


@dataclass(frozen=True)
class Settings:
    """The options of `Examine`, which explains them. Part of every verdict."""

    cell_seconds: float = 30.0
    case_seconds: float = 0.0
    """0: what the table says, `course_lib.checking.limits.CASE_SECONDS`, which imports torch."""
    submission_seconds: float = 60.0
    memory_gib: float = 3.0
    on: str = ""

    @classmethod
    def of(cls, config: Config) -> Settings:
        """Return what the configuration says of `Examine`, and the defaults of the rest."""
        said = config.Examine
        return cls(**{name: said[name] for name in asdict(cls()) if name in said})
