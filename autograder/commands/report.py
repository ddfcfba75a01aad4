"""Show how the class did in an assignment, task by task.

The report shows who passed each task, the distribution of points, the most frequent reasons for
failures with the students who got them, and the time of each check. Reasons that differ only in
numbers count as the same reason. The points are those that were last booked from checks. The same
report is written as a page, grading/report/ASSIGNMENT.html. It names students, so never hand it
out. The command changes no grades.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median

from autograder.collection.roster import kept_roster
from autograder.commands import add_assignment
from autograder.course import Folders, load_config
from autograder.errors import CommandFailed
from autograder.examination.verdict import CheckVerdict, Verdict
from autograder.exporting.grades import extra_credit
from autograder.files import write_whole
from autograder.pool.book import current
from autograder.pool.class_list import students
from autograder.tables import Row, Table, bar, web_page
from course_lib.checking.report import cause_of

add_options = add_assignment
MOST = 10
"""Number of reasons that are listed for a task."""
_BINS = 10


def class_report(
    assignment: str, verdicts: Mapping[str, Sequence[Verdict]], extra: Sequence[Row] = ()
) -> tuple[str, list[Table]]:
    """Return the report: a summary, and tables.

    Args:
        assignment: its name.
        verdicts: student → the verdicts that count, one for each notebook. No verdicts mean that
            the submission is not graded yet.
        extra: a row for each extra credit: student, task, points.

    """
    graded = {student: counting for student, counting in verdicts.items() if counting}
    scores = [sum(verdict.score for verdict in counting) for counting in graded.values()]
    totals = [sum(verdict.max_score for verdict in counting) for counting in graded.values()]
    possible = max(totals, default=0.0)
    summary = f"{assignment}: {len(graded)} graded"
    if scores:
        summary += (
            f"; points from checks: median {median(scores):g}, "
            f"mean {mean(scores):.2f}, of {possible:g} possible"
        )
    if ungraded := sorted(set(verdicts) - set(graded)):
        summary += f"; not graded yet: {', '.join(ungraded)}"
    checks: dict[str, dict[str, CheckVerdict]] = {}
    seconds: dict[str, list[float]] = {}
    for student, counting in graded.items():
        for verdict in counting:
            for check in verdict.checks:
                checks.setdefault(check.task, {})[student] = check
                seconds.setdefault(check.task, []).append(verdict.timings.get(check.task, 0.0))
    tables = [
        Table(
            "Tasks",
            ("task", "points", "got all", "got some", "mean", "check's time (median)"),
            [_task(task, results, seconds[task]) for task, results in checks.items()],
        ),
        Table("Points", ("points", "students", ""), _histogram(scores, possible)),
        Table(
            "Why tasks failed: each student's simplest failed case, visible ones first; "
            "numbers may differ",
            ("task", "students", "who", "reason"),
            [row for task, results in checks.items() for row in _reasons(task, results)],
        ),
        Table(
            "What was unusual in notebooks",
            ("student", "note"),
            [(s, note) for s, counting in graded.items() for v in counting for note in v.notes],
        ),
    ]
    if credit := [row for row in extra if row[0] in graded]:
        title = "Extra credit, which the points above do not contain"
        tables.append(Table(title, ("student", "task", "points"), credit))
    return f"{summary}.", tables


def _task(task: str, checks: Mapping[str, CheckVerdict], seconds: Sequence[float]) -> Row:
    results = checks.values()
    return (
        task,
        max(check.max_score for check in results),
        sum(check.score >= check.max_score for check in results),
        sum(0 < check.score < check.max_score for check in results),
        round(mean(check.score for check in results), 2),
        f"{median(seconds):.1f} s",
    )


def _histogram(scores: Sequence[float], possible: float) -> list[Row]:
    """Count the students in each tenth of the points; full points are counted separately."""
    width = possible / _BINS
    counts = Counter(min(int(score / width), _BINS) if width else 0 for score in scores)
    names = [f"{i * width:.3g} to below {(i + 1) * width:.3g}" for i in range(_BINS)]
    highest = max(counts.values(), default=1)
    return [
        (name, counts[i], bar(counts[i] / highest))
        for i, name in enumerate([*names, f"all {possible:g}"])
    ]


def _reasons(task: str, checks: Mapping[str, CheckVerdict]) -> list[Row]:
    """Return the most frequent reasons for failures, in the words of one of these students."""
    alike: dict[str, list[tuple[str, str]]] = {}
    for student, check in checks.items():
        if check.reason:
            reason = " ".join(check.reason.split())
            alike.setdefault(cause_of(reason), []).append((student, reason))
    frequent = sorted(alike.values(), key=len, reverse=True)[:MOST]
    return [
        (task, len(group), tuple(sorted(s for s, _ in group)), group[0][1]) for group in frequent
    ]


def run(root: Path, arguments: argparse.Namespace) -> int:
    """Write and print the report; return the exit status."""
    folders, name = Folders.at(root), arguments.assignment
    roster = kept_roster(folders.data)
    everyone = students(folders, name)
    in_class = [s for s in everyone if roster.has(s)]
    left = sorted(set(everyone) - set(in_class))
    verdicts = {student: list(current(folders, name, student).values()) for student in in_class}
    if not any(verdicts.values()):
        raise CommandFailed(f"no submission is graded yet: run autograder grade {name}")
    summary, tables = class_report(name, verdicts, extra_credit(load_config(root), name))
    page = folders.data / "report" / f"{name}.html"
    write_whole(page, web_page(f"{name}: the class", summary, tables))
    print("\n\n".join([summary, *(table.as_text() for table in tables)]) + "\n")
    if left:
        print(f"not counted, because they are not in the class list: {', '.join(left)}")
    print(f"as a page: {page}")
    return 0
