"""Turn the verdicts of an assignment into a report on the class, as a page and as text.

For each task, the report shows its points, the share of the class that has all of them, the median
time of its check, and the most frequent reasons for failures. Reasons that differ only in numbers
count as the same reason. Predictions are read from the output in the students' own notebooks.
Predictions give no points, so nobody has a reason to forge them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median

import nbformat

from autograder.collection.tables import format_rows
from autograder.examination.verdict import CheckVerdict, Verdict
from autograder.foreign_text import printable
from autograder.web_page import web_page

MOST = 10
"""Number of reasons that are listed for a task."""
_BINS = 10
_SCORED = re.compile(r"^(?P<question>.{1,200}): (?P<actual>[^:;]+); you predicted (?P<guess>.+): ")
"""The line that `course_lib.checking.predictions.Prediction` shows for a guess after its run."""


@dataclass(frozen=True)
class Reason:
    """A reason why a task failed: the words of one report, and the students with such a report."""

    words: str
    students: tuple[str, ...]


@dataclass(frozen=True)
class TaskReport:
    """The results of one task in the class.

    Attributes:
        task: its name.
        points: the points that it can give.
        passed: number of students with all points.
        partly: number of students with some of the points.
        mean: mean points.
        seconds: median duration of its check.
        reasons: the reasons for failures, the most frequent first.

    """

    task: str
    points: float
    passed: int
    partly: int
    mean: float
    seconds: float
    reasons: tuple[Reason, ...]


@dataclass(frozen=True)
class Guesses:
    """One prediction in the class: the right answer that the runs gave, and the guesses."""

    question: str
    actual: str
    guesses: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class ClassReport:
    """The results of an assignment in the class.

    Attributes:
        assignment: its name.
        scores: student → points from checks.
        max_score: the points that the checks can give.
        tasks: the tasks, in the notebook's order.
        guesses: a row for each prediction that somebody made.
        ungraded: students whose submission has no verdict yet.
        notes: (student, what was put back, joined or left out of their notebook).

    """

    assignment: str
    scores: Mapping[str, float]
    max_score: float
    tasks: tuple[TaskReport, ...]
    guesses: tuple[Guesses, ...]
    ungraded: tuple[str, ...]
    notes: tuple[tuple[str, str], ...] = ()

    def histogram(self) -> list[tuple[str, int]]:
        """Count the students in each tenth of the points; full points are counted separately."""
        width = self.max_score / _BINS
        counts = Counter(
            min(int(score / width), _BINS) if width else 0 for score in self.scores.values()
        )
        names = [f"{i * width:.3g} to below {(i + 1) * width:.3g}" for i in range(_BINS)]
        return [(n, counts[i]) for i, n in enumerate([*names, f"all {self.max_score:g}"])]


def class_report(
    assignment: str,
    verdicts: Mapping[str, Sequence[Verdict]],
    notebooks: Mapping[str, Sequence[Path]],
) -> ClassReport:
    """Return the report.

    Args:
        assignment: its name.
        verdicts: student → the verdicts that count, one for each notebook. No verdicts mean that
            the submission is not graded yet.
        notebooks: student → the submitted notebooks, which show the predictions.

    """
    graded = {student: found for student, found in verdicts.items() if found}
    checks: dict[str, dict[str, CheckVerdict]] = {}
    seconds: dict[str, list[float]] = {}
    for student, found in graded.items():
        for verdict in found:
            for check in verdict.checks:
                checks.setdefault(check.task, {})[student] = check
                seconds.setdefault(check.task, []).append(verdict.timings.get(check.task, 0.0))
    return ClassReport(
        assignment,
        {student: sum(verdict.score for verdict in found) for student, found in graded.items()},
        max((sum(v.max_score for v in found) for found in graded.values()), default=0.0),
        tuple(_task(task, found, median(seconds[task])) for task, found in checks.items()),
        _guesses(path for student in graded for path in notebooks.get(student, ())),
        tuple(sorted(set(verdicts) - set(graded))),
        tuple((s, printable(n)) for s, found in graded.items() for v in found for n in v.notes),
    )


def _task(task: str, checks: Mapping[str, CheckVerdict], seconds: float) -> TaskReport:
    points = max(check.max_score for check in checks.values())
    whole = sum(check.score >= check.max_score for check in checks.values())
    reasons: dict[str, list[tuple[str, str]]] = {}
    for student, check in checks.items():
        if why := _why(check):
            reasons.setdefault(re.sub(r"\d[\d.,e+-]*", "0", why), []).append((student, why))
    sorted_ = sorted(reasons.values(), key=len, reverse=True)
    return TaskReport(
        *(task, points, whole),
        sum(0 < check.score < check.max_score for check in checks.values()),
        sum(check.score for check in checks.values()) / len(checks),
        seconds,
        tuple(Reason(each[0][1], tuple(sorted(s for s, _ in each))) for each in sorted_[:MOST]),
    )


def _why(check: CheckVerdict) -> str:
    """Return the reason of the first failure in the student's report."""
    first = check.first_failure
    return "" if first is None else printable(" ".join(str(first["reason"]).split()))


def _guesses(notebooks: Iterable[Path]) -> tuple[Guesses, ...]:
    answers: dict[str, Counter[str]] = {}
    guesses: dict[str, Counter[str]] = {}
    for path in notebooks:
        for line in _shown(path):
            if scored := _SCORED.match(line):
                question = scored["question"]
                answers.setdefault(question, Counter())[scored["actual"]] += 1
                guesses.setdefault(question, Counter())[scored["guess"]] += 1
    return tuple(
        Guesses(question, answers[question].most_common(1)[0][0], tuple(found.most_common(MOST)))
        for question, found in guesses.items()
    )


def _shown(path: Path) -> set[str]:
    """Return the lines that a notebook's cells show, each once; none if it cannot be read."""
    try:
        cells = nbformat.read(path, as_version=4).cells
        outputs = [each for cell in cells for each in cell.get("outputs", ())]
        texts = [str(o.get("data", {}).get("text/plain", o.get("text", ""))) for o in outputs]
    except Exception:  # a damaged notebook may raise anything, and grading says so elsewhere
        return set()
    return {printable(line) for text in texts for line in text.splitlines()}


# For a terminal ---------------------------------------------------------------------------------


def as_text(report: ClassReport) -> str:
    """Return the report for a terminal or a mail."""
    parts = [_summary(report)]
    rows = [
        (t.task, f"{t.points:g}", t.passed, t.partly, f"{t.mean:.2f}", f"{t.seconds:.1f} s")
        for t in report.tasks
    ]
    header = ("task", "points", "got all", "got some", "mean", "check's time (median)")
    parts.append(format_rows(header, rows))
    most = max((count for _, count in report.histogram()), default=0)
    bars = [
        (name, count, "#" * round(40 * count / most) if most else "")
        for name, count in report.histogram()
    ]
    parts.append(format_rows(("points", "students", ""), bars))
    for task in report.tasks:
        if task.reasons:
            lines = [f"{task.task}: most frequent reasons for failures"]
            lines += [f"  {len(r.students):3} × {r.words}  ({_some(r)})" for r in task.reasons]
            parts.append("\n".join(lines))
    if report.guesses:
        lines = ["predictions: the right answer, and the guesses with their number of students"]
        for each in report.guesses:
            told = ", ".join(f"{guess} ({count})" for guess, count in each.guesses)
            lines.append(f"  {each.question}: right is {each.actual}; guesses: {told}")
        parts.append("\n".join(lines))
    if report.notes:
        lines = [f"  {student}: {note}" for student, note in report.notes]
        parts.append("\n".join(["unusual in notebooks", *lines]))
    return "\n\n".join(parts) + "\n"


def _summary(report: ClassReport) -> str:
    told = f"{report.assignment}: {len(report.scores)} graded"
    if report.scores:
        scores = list(report.scores.values())
        told += (
            f"; points from checks: median {median(scores):g}, "
            f"mean {sum(scores) / len(scores):.2f}, of {report.max_score:g} possible"
        )
    if report.ungraded:
        told += f"; not graded yet: {', '.join(report.ungraded)}"
    return f"{told}."


def _some(reason: Reason) -> str:
    more = len(reason.students) - 3
    return ", ".join(reason.students[:3]) + (f" and {more} more" if more > 0 else "")


# For a browser ----------------------------------------------------------------------------------


def as_page(report: ClassReport) -> str:
    """Return the report as one page that fetches nothing and has no script."""
    students = max(len(report.scores), 1)
    tasks = "".join(
        f"<tr><td>{escape(t.task)}{_bar((t.passed, t.partly), students)}</td>"
        + _numbers(f"{t.points:g}", t.passed, t.partly, f"{t.mean:.2f}", f"{t.seconds:.1f} s")
        + "</tr>"
        for t in report.tasks
    )
    most = max((count for _, count in report.histogram()), default=1) or 1
    bins = "".join(
        f'<tr><td class="n">{escape(name)}</td><td class="n">{count}</td>'
        f'<td class="wide">{_bar((count,), most)}</td></tr>'
        for name, count in report.histogram()
    )
    reasons = "".join(
        f"<h3>{escape(t.task)}</h3><table><tbody>"
        + "".join(
            f'<tr><td class="n">{len(r.students)} ×</td><td>{escape(r.words)}</td>'
            f"<td><details><summary>{escape(r.students[0])}"
            f"{' …' if len(r.students) > 1 else ''}</summary>"
            f"{escape(', '.join(r.students))}</details></td></tr>"
            for r in t.reasons
        )
        + "</tbody></table>"
        for t in report.tasks
        if t.reasons
    )
    guesses = "".join(
        f"<tr><td>{escape(g.question)}</td><td>{escape(g.actual)}</td><td>"
        + escape(", ".join(f"{guess} ({count})" for guess, count in g.guesses))
        + "</td></tr>"
        for g in report.guesses
    )
    return web_page(
        f"{report.assignment}: the class",
        f"""<p>{escape(_summary(report))}</p>
<table><caption>Tasks. A bar shows the class: blue for students with all points of the task, grey
for students with some.</caption><thead><tr><th>task</th><th class="n">points</th>
<th class="n">got all</th><th class="n">got some</th><th class="n">mean</th>
<th class="n">check's time (median)</th></tr></thead>
<tbody>{tasks}</tbody></table>
<h2>How many students have how many points?</h2><table><thead><tr><th class="n">points</th>
<th class="n">students</th><th class="wide"></th></tr></thead><tbody>{bins}</tbody></table>
<h2>Why did tasks fail?</h2>
<p>Each student counts once per task, with the reason of the simplest case that failed. If visible
cases failed, it is the simplest of these. Reasons that differ only in numbers are counted together;
the table shows the reason that one of these students got.</p>{reasons or "<p>No task failed.</p>"}
<h2>What did students predict?</h2>"""
        + (
            "<table><thead><tr><th>question</th><th>right answer</th>"
            f"<th>guesses (number of students)</th></tr></thead><tbody>{guesses}</tbody></table>"
            if guesses
            else "<p>No submitted notebook shows a scored prediction.</p>"
        )
        + "<h2>What was unusual in notebooks?</h2><table><tbody>"
        + "".join(f"<tr><td>{escape(s)}</td><td>{escape(n)}</td></tr>" for s, n in report.notes)
        + "</tbody></table>",
    )


def _numbers(*cells: object) -> str:
    return "".join(f'<td class="n">{escape(str(cell))}</td>' for cell in cells)


def _bar(parts: Sequence[int], of: int) -> str:
    kinds = ("all", "some")
    told = "".join(
        f'<div class="{kind}" style="width:{100 * part / of:.1f}%"></div>'
        for kind, part in zip(kinds, parts, strict=False)
    )
    return f'<div class="bar" aria-hidden="true">{told}</div>'
