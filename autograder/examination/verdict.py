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
        """Full points if every case passed, else none: half-right synchronisation is wrong."""
        return cls(
            report.name,
            points if report.passed else 0.0,
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

    """

    assignment: str
    student: str
    notebook: str
    seed: str
    source_sha256: str
    checks: list[CheckVerdict] = field(default_factory=list)
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)

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
        draft.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")
        draft.replace(path)

    @classmethod
    def read(cls, path: Path) -> Verdict:
        """Read what `write` wrote."""
        data = json.loads(path.read_text())
        data["checks"] = [CheckVerdict(**check) for check in data["checks"]]
        return cls(**data)


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
