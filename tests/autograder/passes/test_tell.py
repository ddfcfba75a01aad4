"""What a student is told above the graded notebook and under a task, from the verdict alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from autograder.examination.verdict import CheckVerdict, Verdict, verdict_path
from autograder.passes.tell import tell

TASK = "average"
SUMS = {"world_size": 2, "bytes_sent": [8, 0], "calls": [{"send": 1}, {}]}
"""A trace as verdicts had it before schema 4: told in words, not drawn."""


def case(passed: bool, hidden: bool = False, **more: Any) -> dict[str, Any]:
    reason = "" if passed else "rank 1: expected 2, got 3"
    return {"name": "2 ranks", "passed": passed, "hidden": hidden, "reason": reason, **more}


def told(data: Path, cases: list[dict[str, Any]], **verdict: Any) -> list[nbformat.NotebookNode]:
    """Return the cells of a notebook with one test cell after it was told of these cases."""
    checks = [CheckVerdict(f"02/{TASK}", 1.0, 3.0, "", cases, verdict.pop("trace", {}))]
    written = Verdict("02", "ada", "02", "5eed", "0", checks, **verdict)
    written.write(verdict_path(data, "02", "ada", "02"))
    nb = new_notebook(cells=[new_code_cell("", metadata={"nbgrader": {"grade_id": TASK}})])
    tell(nb, data, "02", "ada", "02")
    return list(nb.cells)


@pytest.mark.parametrize(
    ("cases", "row"),
    [
        ([case(True), case(True, True)], "visible 1 of 1; 1 of 1 hidden |  |"),
        ([case(True)], "visible 1 of 1 |  |"),
        (
            [case(True), case(False, True)],
            "visible 1 of 1; 0 of 1 hidden | only hidden cases fail |",
        ),
        ([case(False, True), case(False)], "visible 0 of 1; 0 of 1 hidden | 2 ranks: rank 1"),
    ],
)
def test_the_first_failure_is_a_visible_one(
    tmp_path: Path, cases: list[dict[str, Any]], row: str
) -> None:
    overview, cell = told(tmp_path, cases)
    assert f"| `{TASK}` | 1 of 3 | {row}" in overview.source.replace("&#58;", ":")
    assert cell.outputs[0].text.startswith(row.partition(" |")[0])


def test_what_is_for_the_author_of_a_check_no_student_is_told(tmp_path: Path) -> None:
    notes, limits = ["late", "02/average: the judge failed"], ["time, cell 3"]
    overview, _ = told(tmp_path, [case(True)], notes=notes, limits=limits)
    assert "**Also:**\n\n- late\n- time&#44; cell 3" in overview.source
    assert "judge" not in overview.source


@pytest.mark.parametrize("kept_in", ["check", "case"])
def test_what_was_sent_before_it_failed_stands_under_the_task(tmp_path: Path, kept_in: str) -> None:
    given = {"trace": SUMS} if kept_in == "check" else {}
    failed = case(False, trace=SUMS) if kept_in == "case" else case(False)
    _, _, below = told(tmp_path, [failed], **given)
    assert "rank 0&#58; 1 send&#44; 8 B sent" in below.source
    assert "rank 1&#58; no call" in below.source


def test_of_a_hidden_case_nothing_that_was_sent_is_told(tmp_path: Path) -> None:
    assert len(told(tmp_path, [case(False, True, trace=SUMS)])) == 2
    assert len(told(tmp_path, [case(True)], trace=SUMS)) == 2  # nothing failed


def test_question_and_answer_stand_under_the_task(tmp_path: Path) -> None:
    folder = tmp_path / "inquiries" / "ada" / "02"
    folder.mkdir(parents=True)
    (folder / f"{TASK}.md").write_bytes("Why? \u00fc".encode("latin-1"))  # whatever lies there
    assert told(tmp_path, [case(True)])[-1].source == "Why? \ufffd"


@pytest.mark.parametrize("content", [None, "no verdict"])
def test_without_a_verdict_it_says_so(tmp_path: Path, content: str | None) -> None:
    path = verdict_path(tmp_path, "02", "ada", "02")
    if content is not None:
        path.parent.mkdir(parents=True)
        path.write_text(content)
    nb = new_notebook(cells=[new_code_cell("x = 1")])
    tell(nb, tmp_path, "02", "ada", "02")
    assert [cell.source for cell in nb.cells] == [
        "There is no verdict of this notebook: ask whoever graded it.",
        "x = 1",
    ]
