"""The outcome of a check: for the student to read, and for the grader to count."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

_IN = " " * 6


@dataclass(frozen=True)
class CaseResult:
    """How one case went."""

    name: str
    passed: bool
    reason: str
    """One line; empty if passed."""
    detail: str
    """The rest of the explanation: a table of ranks, a traceback, a hint."""
    seconds: float
    hidden: bool = False


@dataclass(frozen=True)
class CheckReport:
    """How a check went, case by case."""

    name: str
    results: tuple[CaseResult, ...]

    @property
    def passed(self) -> bool:
        """Whether there were cases and all of them passed."""
        return bool(self.results) and all(result.passed for result in self.results)

    @property
    def reason(self) -> str:
        """The first failure in one line, or an empty string."""
        return next((result.reason for result in self.results if not result.passed), "")

    def _ipython_display_(self) -> None:
        """Show nothing as a cell's value: ``check`` has printed the report already."""

    def __str__(self) -> str:
        good = sum(result.passed for result in self.results)
        lines = [f"{self.name}: {good} of {len(self.results)} cases passed"]
        explained = False
        for number, result in enumerate(self.results, 1):
            name = f"hidden case {number}" if result.hidden else result.name
            lines.append(f"  {'✓' if result.passed else '✗'} {name}")
            if result.passed:
                continue
            lines += textwrap.wrap(result.reason, 90, initial_indent=_IN, subsequent_indent=_IN)
            # One full explanation is help, ten are noise; of a hidden case it would be a leak.
            if result.detail and not explained and not result.hidden:
                lines.append(textwrap.indent(result.detail, _IN))
                explained = True
        return "\n".join(lines)


class CheckFailed(AssertionError):
    """Raised by ``check(…)`` when a case fails; the report was printed above it."""

    def __init__(self, report: CheckReport) -> None:
        super().__init__(f"{report.name}: {report.reason}")
        self.report = report

    def _render_traceback_(self) -> list[str]:
        """Tell IPython what to show: the report says all, a traceback through our code nothing."""
        return [f"CheckFailed: {self}"]
