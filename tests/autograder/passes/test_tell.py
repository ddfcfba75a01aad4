"""The verdict's results above the graded notebook and under a task, from the verdict alone."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from autograder.examination.budget import Limits
from autograder.examination.submission import Submission
from autograder.examination.verdict import CheckVerdict, Verdict, verdict_path
from autograder.passes.examine import examine_cells
from autograder.passes.tell import tell
from autograder.sandbox.sandbox import Sandbox
from course_lib.checking import Case, Check, Wrong

TASK = "average"


def call(function: Any, mine: Any) -> Any:
    return function(mine)


def case(passed: bool, hidden: bool = False, **more: Any) -> dict[str, Any]:
    reason = "" if passed else "rank 1: expected 2, got 3"
    told = {"name": "2 ranks", "passed": passed, "hidden": hidden, "reason": reason}
    return told | more


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
def test_the_first_failure_is_a_visible_one(
    tmp_path: Path, cases: list[dict[str, Any]], row: str
) -> None:
    overview, cell = told(tmp_path, cases)
    assert f"| `{TASK}` | 1 of 3 | {row}" in overview.source.replace("&#58;", ":")
    passed = row.partition(" |")[0]
    assert cell.outputs[0].text == f"cases passed on the grader's network: {passed}\n"


def test_what_is_for_the_author_of_a_check_no_student_is_told(tmp_path: Path) -> None:
    notes, limits = ["late", "02/average: the judge failed"], ["time, cell 3"]
    overview, _ = told(tmp_path, [case(True)], notes=notes, limits=limits)
    assert "**Also:**\n\n- late\n- limit reached&#58; time&#44; cell 3" in overview.source
    assert "judge" not in overview.source


HOW = {
    "takes too long": "while True: pass",
    "waits for nobody": "dist.recv(torch.zeros(1), 1 - dist.get_rank())",
    "does not fit": "dist.all_reduce(torch.zeros(1 + dist.get_rank()))",
    "raises": "raise ValueError(str(mine))",
    "ends": "os._exit(3)",
    "takes too much memory": "torch.ones(1 << 31)",
    "is wrong": "return [mine, str(globals())]",
    "returns an object": "return object()",
}
RISKY = """
import os, torch, torch.distributed as dist
def f(mine):
    if mine[0] == 33 / 4:
        {how}
    return mine
"""


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(
            how, marks=() if name in ("raises", "is wrong") else pytest.mark.large, id=name
        )
        for name, how in HOW.items()
    ],
)
def test_the_written_feedback_says_nothing_of_a_hidden_case(
    place: Sandbox, tmp_path: Path, how: str
) -> None:
    def inputs(case: Case, generator: Any) -> list[list[float]]:
        return [[case.parameters["number"]]] * 2

    def judge(case: Case, inputs: Any, outputs: Any) -> None:
        if list(outputs) != inputs:
            raise Wrong(f"{case.name}: expected {inputs}, got {outputs}")

    check = Check("f", call, inputs, judge, (Case("public", 2, {"number": 1.5}),), seconds=2)
    hidden = [Case(f"quokka {i}", 2, {"number": 8.25}) for i in range(4)]
    test = {"grade_id": "f", "grade": True, "solution": False, "points": 3, "locked": True}
    nb = new_notebook(
        cells=[
            new_code_cell(RISKY.replace("{how}", how)),
            new_code_cell("", metadata={"nbgrader": {**test, "schema_version": 3}}),
        ]
    )
    verdict = Verdict("02", "ada", "02", "5eed", "0")
    with Submission(place, Limits(cell=5)) as submission:
        examine_cells(nb, {"f": check}, {"f": hidden}, submission, verdict, logging.getLogger())
    assert [case["passed"] for case in verdict.checks[0].cases] == [True] + [False] * 4
    verdict.write(verdict_path(tmp_path, "02", "ada", "02"))
    tell(nb, tmp_path, "02", "ada", "02")
    written = nbformat.writes(nb)
    assert "quokka" not in written
    assert "8.25" not in written


@pytest.mark.parametrize("content", [None, "no verdict"])
def test_without_a_verdict_it_says_so(tmp_path: Path, content: str | None) -> None:
    path = verdict_path(tmp_path, "02", "ada", "02")
    if content is not None:
        path.parent.mkdir(parents=True)
        path.write_text(content)
    nb = new_notebook(cells=[new_code_cell("x = 1")])
    tell(nb, tmp_path, "02", "ada", "02")
    assert [cell.source for cell in nb.cells] == [
        "There is no verdict on this notebook: ask your instructor.",
        "x = 1",
    ]
