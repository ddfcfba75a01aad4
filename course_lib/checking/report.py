"""The outcome of a check: for the student to read, and for the grader to count."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field

from course_lib.checking.cases import VALUES
from course_lib.ranks import Trace

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
    parts: Mapping[str, bool] = field(default_factory=dict)
    """Part of the points → whether this case grants it; empty: those that `passed` grants."""
    ran: bool = True
    """Whether it was run at all; `reason` says why not."""
    trouble: str = ""
    """For the author: the exception that escaped a judge. Else empty."""


@dataclass(frozen=True)
class CheckReport:
    """How a check went, case by case.

    Attributes:
        worth: part → its share of the points; empty: all or nothing.
        places: where all cases ran, for example ``simulated ranks``.
        trace: of the first case that failed and took time: one rank alone communicates in none.
        traced: that case's name.

    """

    name: str
    results: tuple[CaseResult, ...]
    worth: Mapping[str, float] = field(default_factory=dict)
    places: tuple[str, ...] = ()
    trace: Trace | None = field(default=None, compare=False, repr=False)
    traced: str = field(default="", compare=False, repr=False)

    @property
    def passed(self) -> bool:
        """Whether there were cases and all of them passed."""
        return bool(self.results) and all(result.passed for result in self.results)

    @property
    def reason(self) -> str:
        """The first failure in one line, or an empty string."""
        return next((result.reason for result in self.results if not result.passed), "")

    @property
    def parts(self) -> dict[str, bool]:
        """Part of the points → whether it is earned: whether every case grants it."""
        return {
            part: bool(self.results)
            and all(result.parts.get(part, result.passed) for result in self.results)
            for part in self.worth or {VALUES: 1.0}
        }

    @property
    def fraction(self) -> float:
        """The share of the task's points that is earned, from 0 to 1."""
        if self.passed or not self.worth:
            return float(self.passed)
        earned = sum(self.worth[part] for part, passed in self.parts.items() if passed)
        return earned / sum(self.worth.values())

    def _ipython_display_(self) -> None:
        """Show nothing as a cell's value: ``check`` has printed the report already."""

    def __str__(self) -> str:
        good = sum(result.passed for result in self.results)
        where = f", on {' and on '.join(self.places)}" if self.places else ""
        lines = [f"{self.name}: {good} of {len(self.results)} cases passed{where}"]
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
        if self.worth and not self.passed:
            told = ", ".join(f"{p} {'✓' if earned else '✗'}" for p, earned in self.parts.items())
            lines.append(f"  {100 * self.fraction:.0f} % of the points: {told}")
        return "\n".join(lines)


class CheckFailed(AssertionError):
    """Raised by ``check(…)`` when a case fails; the report was printed above it."""

    def __init__(self, report: CheckReport) -> None:
        super().__init__(f"{report.name}: {report.reason}")
        self.report = report

    def _render_traceback_(self) -> list[str]:
        """Tell IPython what to show: the report says all, a traceback through our code nothing."""
        return [f"CheckFailed: {self}"]
