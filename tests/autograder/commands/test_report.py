"""The report on a class counts students, groups reasons, and lets no text of theirs be markup."""

from __future__ import annotations

import pytest

from autograder.commands.report import class_report
from autograder.examination.verdict import CheckVerdict, Verdict
from autograder.tables import web_page


def check(task: str, score: float, reason: str = "") -> CheckVerdict:
    return CheckVerdict(f"a/{task}", score, 4.0, reason, [])


def verdict(student: str, *checks: CheckVerdict, seconds: float = 1.0) -> Verdict:
    timings = {check.task: seconds for check in checks}
    return Verdict("a", student, "a", "s", "d", list(checks), timings=timings)


def test_it_counts_students_and_groups_reasons() -> None:
    verdicts = {
        "ada": [verdict("ada", check("ring", 4), check("tree", 4), seconds=2)],
        "ming": [verdict("ming", check("ring", 0, "rank 1: got 3.5"), check("tree", 2), seconds=2)],
        "noor": [verdict("noor", check("ring", 0, "rank 2: got 7"), check("tree", 0))],
        "eve": [],
    }
    verdicts["ada"][0].notes.append("cell 4 was joined")
    extra = [("ming", "ring", 1.5), ("eve", "ring", 1.0)]
    summary, tables = class_report("a", verdicts, extra)
    tasks, points, reasons, notes, credit = tables
    assert credit.rows == extra[:1], "eve is not graded"
    assert "3 graded" in summary and "median 2" in summary and "not graded yet: eve" in summary
    ring, tree = tasks.rows
    assert ring == ("ring", 4.0, 1, 0, 1.33, "2.0 s") and tree[2:5] == (1, 1, 2.0)
    assert reasons.rows[0] == ("ring", 2, ("ming", "noor"), "rank 1: got 3.5")
    assert sum(row[1] for row in points.rows) == 3 and points.rows[-1][:2] == ("all 8", 1)
    assert notes.rows == [("ada", "cell 4 was joined")]
    text, page = "".join(table.as_text() for table in tables), web_page("a", summary, tables)
    assert all(w in text and w in page for w in ("cell 4 was joined", "ming, noor", "got 3.5"))


@pytest.mark.parametrize("student", ["<script>alert(1)</script>", "x\u202ey"])
def test_no_text_of_a_student_is_markup(student: str) -> None:
    reason = "got <img src=x onerror=alert(1)> & more"
    page = web_page(
        "a", *class_report("a", {student: [verdict(student, check("ring", 0, reason))]})
    )
    assert "<script" not in page and "<img" not in page and "&lt;img" in page
    assert "default-src 'none'" in page
