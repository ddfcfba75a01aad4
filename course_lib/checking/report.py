"""The result of a check: a report for the student, and the points for the grader.

In a notebook the report is HTML: the simplest failing case open, the others folded. Names of cases,
reasons and values may repeat what a student's code returned, so all text is escaped, and none of it
can add a tag. The colours come from JupyterLab, which has a light and a dark theme. Outside
JupyterLab, the colours are shades that fit both.
"""

from __future__ import annotations

import base64
import json
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from typing import Any

from course_lib.checking.box import box, mark
from course_lib.checking.cases import VALUES
from course_lib.ranks import Trace
from course_lib.ranks.explain.words import counted

_IN = " " * 6


@dataclass(frozen=True)
class CaseResult:
    """The result of one case."""

    name: str
    passed: bool
    reason: str
    """One line; empty if passed."""
    detail: str
    """The rest of the explanation: a table of ranks, a traceback, a hint."""
    seconds: float
    hidden: bool = False
    parts: Mapping[str, bool] = field(default_factory=dict)
    """Part of the points that this case decides → whether it grants it. Empty: `passed` decides."""
    ran: bool = True
    """Whether the case was run at all; if it was not, `reason` says why."""
    in_short: str = ""
    """Why it may have failed, without anything that could reveal the case's inputs; or empty."""
    trouble: str = ""
    """For the author: the traceback of an unexpected exception in a judge; else empty."""
    summary: str = ""
    """The reason without the text that `detail` also has; empty: it is the same as `reason`."""
    difficulty: Sequence[int] = ()
    """How hard it is to find a mistake in the case; see `Case`."""
    cost: Mapping[str, float] = field(default_factory=dict)
    """If the ranks have a virtual clock: its ``seconds`` when the last rank ended, ``computed``
    (seconds) and ``sent`` (bytes), each of the rank with the most, and the ``rounds`` of rank 0:
    its number of operations."""


@dataclass(frozen=True)
class CheckReport:
    """The result of a check, case by case.

    Attributes:
        worth: part → its share of the points; empty: all or nothing.
        places: where all cases ran, for example ``simulated ranks``.
        trace: the trace of the simplest case that failed and took time. A case with a single rank
            takes no time, because it does not communicate.
        traced: that case's name.
        function: name of the student's function.
        only_form: whether the check looked only at the form of an answer, which the grader judges.

    """

    name: str
    results: tuple[CaseResult, ...]
    worth: Mapping[str, float] = field(default_factory=dict)
    places: tuple[str, ...] = ()
    trace: Trace | None = field(default=None, compare=False, repr=False)
    traced: str = field(default="", compare=False, repr=False)
    function: str = field(default="", compare=False, repr=False)
    only_form: bool = False

    @property
    def undecided(self) -> str:
        """What is left to the grader, if only the form was checked and is right; else empty."""
        return "form ✓; the grader judges the numbers" if self.only_form and self.passed else ""

    @property
    def passed(self) -> bool:
        """Whether there were cases and all of them passed."""
        return bool(self.results) and all(result.passed for result in self.results)

    @property
    def causes(self) -> list[list[CaseResult]]:
        """The failed cases, a list for each cause: its simplest case, then its others in order.

        The lists are sorted by their first cases, from simple to hard.
        """
        causes: dict[object, list[CaseResult]] = {}
        for result in sorted((result for result in self.results if not result.passed), key=_place):
            causes.setdefault((result.hidden, cause_of(result.reason)), []).append(result)
        order = {id(result): i for i, result in enumerate(self.results)}
        return [
            [first, *sorted(similar, key=lambda result: order[id(result)])]
            for first, *similar in causes.values()
        ]

    @property
    def reason(self) -> str:
        """Why the simplest failed case failed, in one line; or an empty string."""
        return next((cases[0].reason for cases in self.causes), "")

    def title_of(self, result: CaseResult) -> str:
        """Return a case's name, or the number of a hidden case."""
        if not result.hidden:
            return result.name
        number = next(i for i, listed in enumerate(self.results, 1) if listed is result)
        return f"hidden case {number}"

    @staticmethod
    def the_same(count: int) -> str:
        """Return the text before the names of `count` more cases that failed for the same cause."""
        return f"The same in {counted(count, 'other case')}"

    @property
    def heading(self) -> str:
        """The first line: how many cases passed, and where they ran."""
        if self.undecided:
            return f"{self.name}: {self.undecided}"
        good = sum(result.passed for result in self.results)
        places = f", on {' and on '.join(self.places)}" if self.places else ""
        of = counted(len(self.results), "case")
        return f"{self.name}: {good} of {of} passed{places}"

    @property
    def points(self) -> str:
        """The share of the points, if a failed check has parts; else an empty string."""
        if self.passed or not self.worth:
            return ""
        earned = ", ".join(f"{p} {'✓' if has else '✗'}" for p, has in self.parts.items())
        return f"{100 * self.fraction:.0f} % of the points: {earned}"

    @property
    def parts(self) -> dict[str, bool]:
        """Part of the points → whether it is earned: some cases decide it, and all grant it."""
        earned = {}
        for part in self.worth or {VALUES: 1.0}:
            decided = [
                result.parts.get(part, result.passed)
                for result in self.results
                if part in result.parts or not result.parts
            ]
            earned[part] = bool(decided) and all(decided)
        return earned

    @property
    def fraction(self) -> float:
        """The share of the task's points that is earned, from 0 to 1; 0 while `undecided`."""
        if self.undecided:
            return 0.0
        if self.passed or not self.worth:
            return float(self.passed)
        earned = sum(self.worth[part] for part, passed in self.parts.items() if passed)
        return earned / sum(self.worth.values())

    def _ipython_display_(self) -> None:
        """Show nothing as a cell's value, because ``check`` has already printed the report."""

    def _repr_html_(self) -> str:
        """Return the report as HTML for a notebook, with the timeline of the failed case."""
        return html_of(self, self.picture)

    @cached_property
    def picture(self) -> tuple[bytes, str] | None:
        """The timeline of the case `traced`: a PNG, drawn at the first use, and its description."""
        if self.trace is None or not self.trace.operations:
            return None
        from course_lib.ranks.trace.figure import png_of  # import matplotlib only if needed

        try:
            figure = self.trace.plot()
            return png_of(figure), figure.alt
        except Exception:  # the picture is optional: the report explains the failure without it
            return None

    def __str__(self) -> str:
        if self.undecided:
            return self.heading
        lines = [self.heading]
        lines += [f"  ✓ {self.title_of(result)}" for result in self.results if result.passed]
        explained = False
        for first, *similar in self.causes:
            lines.append(f"  ✗ {self.title_of(first)}")
            # One full explanation helps, ten do not. For a hidden case it would reveal the case.
            full = bool(first.detail) and not explained and not first.hidden
            lines += _wrapped(first.summary if full and first.summary else first.reason)
            if full:
                lines.append(textwrap.indent(first.detail, _IN))
                explained = True
            if similar:
                names = _the_first_two(list(map(self.title_of, similar)))
                lines += _wrapped(f"{self.the_same(len(similar))}: {names}")
        lines += [f"  {self.points}"] if self.points else []
        return "\n".join(lines)


_NUMBER = r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?"
_LEFT_OUT = (
    (r"\bb?float\d+\b", "float"),  # all dtypes count as the same
    (rf"(?<![\w.]){_NUMBER}(?: ?(?:B|[KMG]iB|ns|µs|ms|s)\b)?", "#"),
    (r"\[#(?:, #)*\]", ""),  # the position of an element
    (r"#(?:(?:, |-| and | → rank )#)+", "#"),
    (r" \(#\)", ""),
    (r"\b[Rr]anks?\b", "rank"),
    (r"\b(?:transposed|strided)\b", "layout"),
)


def cause_of(reason: str) -> str:
    """Return the reason without numbers, ranks and positions; keep equal sentences only once.

    Two failures have the same cause if these texts are equal.
    """
    for pattern, instead in _LEFT_OUT:
        reason = re.sub(pattern, instead, reason)
    parts = (part.rstrip(". ") for part in re.split(r"[.;] ", reason))
    return "; ".join(dict.fromkeys(parts))


def _place(result: CaseResult) -> tuple[Any, ...]:
    """Order failed cases: simple visible ones first, then hidden ones, then those not run.

    Hidden cases keep their own order, so that a report does not reveal how hard they are.
    """
    return not result.ran, result.hidden, () if result.hidden else tuple(result.difficulty)


def _the_first_two(names: Sequence[str]) -> str:
    return " · ".join([*names[:2], *([f"and {len(names) - 2} more"] if names[2:] else [])])


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 90, initial_indent=_IN, subsequent_indent=_IN)


class CheckFailed(AssertionError):
    """Raised by ``check(…)`` if a case fails, after the report was printed."""

    def __init__(self, report: CheckReport) -> None:
        super().__init__(f"{report.name}: {report.reason}")
        self.report = report

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows: a line that does not repeat the report above it."""
        return ["CheckFailed: the report above says what failed, and why"]


# As HTML --------------------------------------------------------------------------------------


def html_of(report: CheckReport, picture: tuple[bytes, str] | None = None) -> str:
    """Return the report as HTML that runs nothing and fetches nothing.

    Args:
        report: the report.
        picture: a PNG of what the ranks did in the case `report.traced`, and its description.

    """
    good = [result for result in report.results if result.passed and not report.undecided]
    heading = f"<strong>{escape(report.heading)}</strong>"
    parts = [f"<p>{mark(report.passed)} {heading}</p>"]
    if report.undecided:
        parts = [f'<p class="open">○ {heading}</p>']
    if good:
        count = f"{counted(len(good), 'case')} passed"
        names = _list(escape(report.title_of(result)) for result in good)
        parts.append(f"<details><summary>{mark(True)} {count}</summary>{names}</details>")
    for number, results in enumerate(report.causes):
        drawn = picture if any(result.name == report.traced for result in results) else None
        parts.append(_cause(report, results, drawn, first=number == 0))
    parts += [f"<p>{escape(report.points)}</p>"] if report.points else []
    return box("report", "".join(parts))


def _cause(
    report: CheckReport, results: list[CaseResult], picture: tuple[bytes, str] | None, first: bool
) -> str:
    """Return the cases that failed for one reason: the simplest in full, the others below it."""
    shown, *similar = results
    full = bool(shown.detail) and not shown.hidden
    body = [f"<p>{escape(shown.summary if full and shown.summary else shown.reason)}</p>"]
    body += [_paragraphs(shown.detail)] if full else []
    if picture is not None:
        body.append(_picture(report.traced, *picture))
    if report.function and not shown.hidden:
        name, case = (json.dumps(text, ensure_ascii=False) for text in (report.name, shown.name))
        line = f"check({name}, {report.function}, case={case})"
        body.append(f"<p>To run only this case: <code>{escape(line)}</code></p>")
    if similar:
        names = _list(
            f"{escape(report.title_of(result))}<br>{escape(result.reason)}" for result in similar
        )
        summary = f"<summary>{escape(report.the_same(len(similar)))}</summary>"
        body.append(f"<details>{summary}{names}</details>")
    return (
        f'<details class="case{" first" if first else ""}"{" open" if first else ""}>'
        f"<summary>{mark(False)} <strong>{escape(report.title_of(shown))}</strong></summary>"
        f"{''.join(body)}</details>"
    )


def _paragraphs(text: str) -> str:
    """Return sentences as paragraphs, which can wrap; tables and tracebacks keep their lines."""
    parts = [part for part in text.split("\n\n") if part.strip()]
    return "".join(
        f"<pre>{escape(part)}</pre>" if "\n" in part.strip() else f"<p>{escape(part)}</p>"
        for part in parts
    )


def _picture(case: str, png: bytes, description: str) -> str:
    data = base64.b64encode(png).decode("ascii")
    return (
        f"<p>The ranks over time in the case ‘{escape(case)}’:</p>"
        f'<img alt="{escape(description)}" src="data:image/png;base64,{data}">'
    )


def _list(items: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"
