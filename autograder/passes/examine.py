"""The pass of ``nbgrader autograde`` that decides the points, in place of nbgrader's Execute.

Code cells of the rebuilt notebook are run in the sandbox. A test cell is *not* run: its grade id
names a check, the examiner runs that check's public and hidden cases on ranks in the sandbox,
compares what they return in this process, and writes the cell's outputs itself. nbgrader's own
`SaveAutoGrades` then reads the points from these outputs, as always.
"""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Any

from nbconvert.exporters.exporter import ResourcesDict
from nbformat import NotebookNode
from nbformat.v4 import new_output
from nbgrader.preprocessors import NbGraderPreprocessor
from nbgrader.utils import is_grade, is_solution
from traitlets import Float, Unicode

from autograder.examination.submission import CellOutcome, Submission
from autograder.examination.verdict import (
    CheckVerdict,
    Verdict,
    source_digest,
    verdict_path,
    versions,
)
from autograder.sandbox.place import SandboxedPlace
from course_lib.checking import Check, CheckReport
from course_lib.checking.local import load_checks, load_module
from course_lib.checking.run_check import run_check

EXPLORE = "explore"
"""Tag of released cells that are there to play with: the grader does not run them."""


class Examine(NbGraderPreprocessor):
    """Grades one notebook in a sandbox of its own."""

    cell_seconds = Float(30.0, help="Time limit of one code cell, in seconds.").tag(config=True)
    seed = Unicode(
        "",
        help="Draw the cases' inputs from this seed. Default: a secret one, kept in the verdict.",
    ).tag(config=True)

    def preprocess(
        self, nb: NotebookNode, resources: ResourcesDict
    ) -> tuple[NotebookNode, ResourcesDict]:
        """Run the notebook's cells and checks; write outputs into it and a verdict beside it."""
        start = time.monotonic()
        coursedir = self.parent.parent.coursedir
        names = resources["nbgrader"]
        assignment, student, notebook = (
            names[key] for key in ("assignment", "student", "notebook")
        )
        source = Path(coursedir.format_path(coursedir.source_directory, ".", assignment)).resolve()
        checks = load_checks(source / "checks.py")
        hidden = load_module(source / "hidden.py")
        verdict = Verdict(
            assignment,
            student,
            notebook,
            self.seed or secrets.token_hex(8),
            source_digest([cell.source for cell in nb.cells if cell.cell_type == "code"]),
            versions=versions(),
        )
        place = SandboxedPlace(source / "checks.py", masked=hidden.MASKED)
        with place, Submission(place, self.cell_seconds) as examination:
            count = 0
            for cell in nb.cells:
                if cell.cell_type != "code":
                    continue
                count += 1
                cell.execution_count = count
                if is_grade(cell) and not is_solution(cell):
                    check_name = cell.metadata.nbgrader.grade_id
                    report = self._examine(
                        f"{assignment}/{check_name}", checks, hidden.HIDDEN, examination, verdict
                    )
                    points = float(cell.metadata.nbgrader.points)
                    verdict.checks.append(CheckVerdict.of(report, points))
                    cell.outputs = graded_outputs(report, verdict.checks[-1].score, count)
                elif EXPLORE in cell.metadata.get("tags", ()):
                    cell.outputs = []
                else:
                    cell.outputs = cell_outputs(examination.run_cell(cell.source, count))
        verdict.seconds = time.monotonic() - start
        path = verdict_path(
            Path(coursedir.root) / Path(coursedir.autograded_directory).parent,
            *(assignment, student, notebook),
        )
        verdict.write(path)
        self.log.info("%g of %g points; verdict: %s", verdict.score, verdict.max_score, path)
        return nb, resources

    def _examine(
        self,
        name: str,
        checks: dict[str, Check],
        hidden: dict[str, Any],
        examination: Submission,
        verdict: Verdict,
    ) -> CheckReport:
        short = name.rpartition("/")[2]
        if short not in checks:
            raise LookupError(
                f"the test cell '{short}' has no check of that name in checks.py; "
                f"there are: {', '.join(checks)}"
            )
        self.log.info("Examining %s", name)
        return run_check(
            name,
            checks[short],
            examination.runner(short),
            seed=verdict.seed,
            hidden=hidden.get(short, ()),
            progress=lambda result: self.log.debug(
                "  %s %s %s", "✓" if result.passed else "✗", result.name, result.reason
            ),
        )


def graded_outputs(report: CheckReport, score: float, count: int) -> list[NotebookNode]:
    """Return a test cell's outputs: the report, and the points in the form nbgrader reads.

    The points are always written, also the full ones: of a cell without a result nbgrader thinks
    that it is worth full points.
    """
    return [
        new_output("stream", name="stdout", text=f"{report}\n"),
        new_output("execute_result", {"text/plain": repr(float(score))}, execution_count=count),
    ]


def cell_outputs(outcome: CellOutcome) -> list[NotebookNode]:
    """Return a code cell's outputs: plain text only, whatever the student displayed."""
    outputs = []
    for name in ("stdout", "stderr"):
        if text := getattr(outcome, name):
            outputs.append(new_output("stream", name=name, text=text))
    if outcome.error:
        kind, _, message = outcome.error.partition(": ")
        trace = outcome.trace or outcome.error
        outputs.append(new_output("error", ename=kind, evalue=message, traceback=[trace]))
    return outputs
