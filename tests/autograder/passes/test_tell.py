"""The verdict's results above the graded notebook and under a task, from the verdict alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from autograder.examination.verdict import CheckVerdict, Verdict, verdict_path
from autograder.passes.tell import tell

TASK = "average"


def case(passed: bool, hidden: bool = False, **fields: Any) -> dict[str, Any]:
    reason = "" if passed else "rank 1: expected 2, got 3"
    result = {"name": "2 ranks", "passed": passed, "hidden": hidden, "reason": reason}
    return result | {"ran": True, "difficulty": (2,)} | fields


def told(data: Path, cases: list[dict[str, Any]], **verdict: Any) -> list[nbformat.NotebookNode]:
    """Return the cells of a notebook with one test cell, after these cases were written to it."""
    checks = [CheckVerdict(f"02/{TASK}", 1.0, 3.0, "", cases, verdict.pop("trace", {}))]
    written = Verdict("02", "ada", "02", "5eed", "0", checks, **verdict)
    written.write(verdict_path(data, "02", "ada", "02"))
    nb = new_notebook(cells=[new_code_cell("", metadata={"nbgrader": {"grade_id": TASK}})])
    tell(nb, data, "02", "ada", "02")
    return list(nb.cells)


@pytest.mark.parametrize(
    ("cases", "row"),
    [
        ([case(True), case(True, True)], "1 of 1 visible; 1 of 1 hidden |  |"),
        ([case(True)], "1 of 1 visible |  |"),
        (
            [case(True), case(False, True)],
            "1 of 1 visible; 0 of 1 hidden | only hidden cases fail |",
        ),
        ([case(False, True), case(False)], "0 of 1 visible; 0 of 1 hidden | 2 ranks: rank 1"),
        (
            [
                case(False, name="late", ran=False, difficulty=()),
                case(False, name="hard", difficulty=(2, 2)),
                case(False, name="simple", difficulty=(1, 4)),
            ],
            "0 of 3 visible | simple: rank 1",
        ),
    ],
)
def test_the_first_failure_is_a_visible_one(tmp_path, cases, row):
    overview, cell = told(tmp_path, cases)
    assert f"| `{TASK}` | 1 of 3 | {row}" in overview.source.replace("&#58;", ":")
    passed = row.partition(" |")[0]
    assert cell.outputs[0].text == f"cases passed on the grader's network: {passed}\n"


def test_what_is_for_the_author_of_a_check_no_student_is_told(tmp_path: Path) -> None:
    notes = ["late, by 3 days", "02/average: the judge failed"]
    overview, _ = told(tmp_path, [case(True)], notes=notes)
    assert overview.source.endswith("**Also:**\n\n- late&#44; by 3 days")
    assert "judge" not in overview.source
