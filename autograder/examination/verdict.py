"""Verdicts: the record of an examination, its result, and the data needed to repeat it.

The inputs of a submission's cases are drawn from a seed, which is secret and the same every time.
It comes from a secret of the assignment, kept next to the gradebook, and from the submitted code.
So grading a class twice uses the same inputs twice. A student who submits different code gets new
inputs, not those that the first report may have shown.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import platform
import secrets
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autograder.course import Folders, handed_out
from autograder.files import write_whole
from course_lib import READING_ORDER

if TYPE_CHECKING:  # these modules import torch, which reading a verdict does not need
    from course_lib.checking import CheckReport
    from course_lib.ranks import Trace


SCHEMA = 5
"""Version of the file format. `Verdict.read` reads no other."""
MAX_EVENTS = 400
"""Largest number of events kept of a trace: enough for a picture, at most 70 kB per verdict."""
_WRONG = "The result or the behaviour of the function is wrong in this case."
KEPT = ("rank", "kind", "group", "peer", "bytes", "dtype", "seq", "start", "end")
"""Fields of `course_lib.ranks.trace.event.Event` that are kept: a student can name none of them."""


@dataclass(frozen=True)
class CheckVerdict:
    """One graded check.

    Attributes:
        trace: the messages in the first public case that failed, see `trace_summary`; empty if
            none failed, or the failed cases sent nothing.

    """

    name: str
    score: float
    max_score: float
    reason: str
    cases: list[dict[str, Any]]
    trace: dict[str, Any] = field(default_factory=dict)

    @property
    def task(self) -> str:
        """The check's name without its assignment: the cell's id in the notebook."""
        return self.name.rpartition("/")[2]

    @classmethod
    def of(cls, report: CheckReport, points: float) -> CheckVerdict:
        """Return full points if every case passed, else the share of the points that is earned."""
        return cls(
            report.name,
            points * report.fraction,
            points,
            report.reason,
            [asdict(result) for result in report.results],
            {} if report.trace is None else trace_summary(report.trace, report.traced),
        )


@dataclass
class Verdict:
    """One graded notebook of one submission.

    Attributes:
        seed: the seed of every input of every case; grade with the same seed to replay.
        class_seed: the seed of the hidden cases, the same for a whole class.
        source_sha256: digest of the code that was examined, cell by cell.
        seconds: duration of the examination on the wall clock.
        notes: other events that somebody should know of: time used up, a judge that failed.
        checks_sha256: digest of everything else that determines the result: the checks, the hidden
            cases, the released notebook, the course's version.
        settings: the limits that were in force, and the real ranks if any.
        timings: seconds for its cells, and for each check.
        host: the machine on which it was examined.
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
    checks_sha256: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
    class_seed: str = ""
    host: str = ""
    schema: int = SCHEMA

    @property
    def key(self) -> str:
        """The name of this verdict: equal for equal notebook, code, checks, seed and settings."""
        content = (self.notebook, self.source_sha256, self.checks_sha256, self.seed, self.settings)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:20]

    @property
    def score(self) -> float:
        """Points from the checks, without questions that are graded by hand."""
        return sum(check.score for check in self.checks)

    @property
    def max_score(self) -> float:
        """Points that the checks can give."""
        return sum(check.max_score for check in self.checks)

    @property
    def reason(self) -> str:
        """Why points are missing: the first failure of the first failed check."""
        return next((f"{c.task}: {c.reason}" for c in self.checks if c.reason), "")

    def kept_in(self, folders: Folders) -> Path:
        """Return the file that `passes.examine.keep` writes, beside the graded notebook."""
        return folders.graded(self.assignment, self.student) / f"{self.key}.json"

    def write(self, path: Path) -> None:
        """Write the verdict as JSON, completely or not at all."""
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False, default=str)
        write_whole(path, f"{text}\n")

    @classmethod
    def read(cls, path: Path) -> Verdict:
        """Read a file that `write` wrote.

        Raises:
            ValueError: it is no verdict, or one of another version.

        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if (schema := data["schema"]) != SCHEMA:
                raise ValueError(f"it has schema {schema}, but this version reads schema {SCHEMA}")
            checks = [CheckVerdict(**check) for check in data.pop("checks")]
            return cls(**data, checks=checks)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} is not a verdict that can be read: {error}") from error


def points_of(verdicts: Iterable[Verdict]) -> dict[str, float]:
    """Return task → points, of the verdicts on one submission."""
    return {check.task: check.score for verdict in verdicts for check in verdict.checks}


def trace_summary(trace: Trace, case: str) -> dict[str, Any]:
    """Return what a picture of a trace needs.

    Args:
        trace: the trace of the messages that the grader carried.
        case: the name of its case.

    Returns:
        The case, its number of ranks, and the fields `KEPT`, in this order, of the first
        `MAX_EVENTS` events. ``cut`` says whether there are more.

    """
    return {
        "case": case,
        "world_size": trace.world_size,
        "events": [[getattr(event, name) for name in KEPT] for event in trace.events[:MAX_EVENTS]],
        "cut": len(trace.events) > MAX_EVENTS,
    }


def source_digest(sources: list[str]) -> str:
    """Return the SHA-256 of the cells' sources and of their order."""
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()


def checks_digest(source: Path, released: Path) -> str:
    """Return the SHA-256 of everything but its own code that determines a submission's result.

    Args:
        source: the assignment's folder under ``instructor/``.
        released: the notebook that students were given.

    """
    course = Path(__file__).parents[2] / "course_lib"
    judges_and_references = ("checking", "capstone", *READING_ORDER)
    content = hashlib.sha256(version("sgd-to-ddp").encode())
    for path in (
        *sorted(handed_out(source).glob("*.py")),
        source / "hidden.py",
        released,
        *sorted(p for name in judges_and_references for p in _files_of(course / name)),
    ):
        content.update(f"{path.name} {path.stat().st_size}\0".encode() + path.read_bytes())
    return content.hexdigest()


def _files_of(module: Path) -> Iterable[Path]:
    return [module.with_suffix(".py")] if not module.is_dir() else module.rglob("*.py")


def versions() -> dict[str, str]:
    """Return the versions of the software that a replay must match."""
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in ("sgd-to-ddp", "torch", "nbgrader")},
    }


def verdict_path(root: Path, assignment: str, student: str, notebook: str) -> Path:
    """Return where the verdict of one submitted notebook is kept."""
    return root / "verdicts" / assignment / student / f"{notebook}.json"


def assignment_secret(data: Path, assignment: str) -> str:
    """Return the assignment's secret; the first process that needs it makes it.

    Args:
        data: the folder of the gradebook.
        assignment: its name.

    """
    path = data / "seeds" / assignment
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent) as draft:
            print(secrets.token_hex(32), file=draft, flush=True)
            with contextlib.suppress(FileExistsError):
                os.link(draft.name, path)  # the first process wins; the file is always complete
    return path.read_text().strip()


def class_seed(secret: str) -> str:
    """Return the seed of an assignment's hidden cases, in hexadecimal digits."""
    return hmac.new(secret.encode(), b"hidden cases", hashlib.sha256).hexdigest()[:16]


def submission_seed(secret: str, student: str, notebook: str, source_sha256: str) -> str:
    """Return the seed of one notebook of one student, in hexadecimal digits."""
    content = "\0".join((student, notebook, source_sha256))
    return hmac.new(secret.encode(), content.encode(), hashlib.sha256).hexdigest()[:16]


def for_the_student(report: CheckReport) -> CheckReport:
    """Return the student's version: of a failed hidden case, it has only the kind of failure."""
    results = (
        replace(result, reason=result.in_short or _WRONG, detail="")
        if result.hidden and not result.passed and result.ran
        else result
        for result in report.results
    )
    return replace(report, results=tuple(results))


def notes_on(report: CheckReport) -> list[str]:
    """Return the exceptions inside the check, for its author."""
    return [
        f"{report.name}: the check itself raised an exception in case {result.name!r}: "
        f"{result.trouble[-3500:]}"
        for result in report.results
        if result.trouble
    ]
