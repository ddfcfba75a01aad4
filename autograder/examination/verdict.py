"""Verdicts: what was examined, how it went, and what is needed to do it again."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it imports torch, which is not needed to read a verdict
    from course_lib.checking import CheckReport


SCHEMA = 2
"""Version of the files. 1: had no number, no notes. `Verdict.read` reads all up to this one."""


@dataclass(frozen=True)
class CheckVerdict:
    """One graded check."""

    name: str
    score: float
    max_score: float
    reason: str
    cases: list[dict[str, Any]]

    @classmethod
    def of(cls, report: CheckReport, points: float) -> CheckVerdict:
        """Full points if every case passed; else the parts that are earned, where it has parts."""
        return cls(
            report.name,
            points * report.fraction,
            points,
            report.reason,
            [asdict(result) for result in report.results],
        )


@dataclass
class Verdict:
    """One graded notebook of one submission.

    Attributes:
        seed: every input of every case was drawn from it; grade with the same seed to replay.
        source_sha256: of the code that was examined, cell by cell.
        notes: what else happened that somebody should know: time used up, a judge that failed.
        schema: version of the file's format.

    """

    assignment: str
    student: str
    notebook: str
    seed: str
    source_sha256: str
    checks: list[CheckVerdict] = field(default_factory=list)
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    schema: int = SCHEMA

    @property
    def score(self) -> float:
        """Points of the checks; questions graded by hand are not in it."""
        return sum(check.score for check in self.checks)

    @property
    def max_score(self) -> float:
        """Points that the checks can give."""
        return sum(check.max_score for check in self.checks)

    @property
    def reason(self) -> str:
        """Why points are missing: the first failure of the first failed check."""
        return next(
            (f"{c.name.rpartition('/')[2]}: {c.reason}" for c in self.checks if c.reason), ""
        )

    def write(self, path: Path) -> None:
        """Write the verdict as JSON, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.{os.getpid()}.part")
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False, default=str)
        draft.write_text(f"{text}\n", encoding="utf-8", errors="replace")
        draft.replace(path)

    @classmethod
    def read(cls, path: Path) -> Verdict:
        """Read what `write` wrote, now or in an earlier version.

        Raises:
            ValueError: it is no verdict, or one of a later version.

        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            schema = data.pop("schema", 1)
            if schema > SCHEMA:
                raise ValueError(f"it has schema {schema}; this version reads up to {SCHEMA}")
            checks = [CheckVerdict(**check) for check in data.pop("checks")]
            return cls(**data, checks=checks)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} is not a verdict that can be read: {error}") from error


def source_digest(sources: list[str]) -> str:
    """Return the SHA-256 of the cells' sources and of their order."""
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()


def versions() -> dict[str, str]:
    """Return the versions that a replay needs."""
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in ("sgd-to-ddp", "torch", "nbgrader")},
    }


def verdict_path(root: Path, assignment: str, student: str, notebook: str) -> Path:
    """Return where the verdict of one submitted notebook is kept."""
    return root / "verdicts" / assignment / student / f"{notebook}.json"
