"""List the options of an examination, once for both nbgrader's pass and the pool."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from traitlets.config import Config

from course_lib.limits import CASE_SECONDS, CELL_SECONDS, CELLS_SECONDS


@dataclass(frozen=True)
class Settings:
    """The options of `Examine`, which explains them. They are part of every verdict."""

    cell_seconds: float = CELL_SECONDS
    case_seconds: float = CASE_SECONDS
    submission_seconds: float = CELLS_SECONDS
    memory_gib: float = 3.0
    on: str = ""

    @classmethod
    def of(cls, config: Config) -> Settings:
        """Return the configuration's options of `Examine`, with defaults for the rest."""
        said = config.Examine
        return cls(**{name: said[name] for name in asdict(cls()) if name in said})
