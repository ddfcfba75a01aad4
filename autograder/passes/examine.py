"""The pass of ``nbgrader autograde`` that decides the points, in place of nbgrader's Execute.

Code cells of the rebuilt notebook are run in the sandbox. A test cell is *not* run: its grade id
names a check, the examiner runs that check's public and hidden cases on ranks in the sandbox,
carries their messages, compares what they return, and writes the cell's outputs itself.
nbgrader's own `SaveAutoGrades` then reads the points from these outputs, as always.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nbconvert.exporters.exporter import ResourcesDict
from nbformat import NotebookNode
from nbformat.v4 import new_output
from nbgrader.preprocessors import NbGraderPreprocessor
from nbgrader.utils import is_grade, is_solution
from traitlets import Enum, Float, Unicode

from autograder.examination.budget import Limits
from autograder.examination.check import Examined, examine
from autograder.examination.gpus import gpu_mounts
from autograder.examination.submission import CellOutcome, Submission
from autograder.examination.verdict import (
    CheckVerdict,
    Verdict,
    source_digest,
    verdict_path,
    versions,
)
from autograder.passes import vet
from autograder.sandbox.bubblewrap import Limits as BoxLimits
from autograder.sandbox.place import SandboxedPlace
from course_lib import READING_ORDER
from course_lib.checking import Check, CheckReport
from course_lib.checking.local import load_checks, load_module
from course_lib.desk.notebooks import EXPLORE


class Examine(NbGraderPreprocessor):
    """Grades one notebook, each process of its student's in a cell of the sandbox."""

    cell_seconds = Float(30.0, help="Time limit of one code cell, in seconds.").tag(config=True)
    case_seconds = Float(10.0, help="Time limit of one case of a check, in seconds.").tag(
        config=True
    )
    submission_seconds = Float(
        60.0, help="Time limit of all that one submission's code does, in seconds."
    ).tag(config=True)
    memory_gib = Float(
        3.0, help="Memory that a submission's processes may hold together, in GiB."
    ).tag(config=True)
    on = Enum(
        ("", "cpu", "gpu"),
        "",
        help="Run what is right on the grader's network once more on real ranks: 'cpu' (gloo) or "
        "'gpu'. The verdict is the same unless they fail. Default: do not.",
    ).tag(config=True)
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
            notes=[*vet.notes.get((student, assignment), ()), *nb.metadata.get("rebuild", ())],
        )
        limits = Limits(
            cell=self.cell_seconds, case=self.case_seconds, submission=self.submission_seconds
        )
        place = warm_place(hidden.MASKED, int(self.memory_gib * 2**30), gpus=self.on == "gpu")
        with Submission(place, limits) as submission:
            self._examine_cells(nb, checks, hidden.HIDDEN, submission, verdict)
        if submission.budget.left <= 0:
            verdict.notes.append(f"the submission used up its {self.submission_seconds:g} s")
        verdict.seconds = time.monotonic() - start
        path = verdict_path(
            Path(coursedir.root) / Path(coursedir.autograded_directory).parent,
            *(assignment, student, notebook),
        )
        verdict.write(path)
        self.log.info("%g of %g points; verdict: %s", verdict.score, verdict.max_score, path)
        return nb, resources

    def _examine_cells(
        self,
        nb: NotebookNode,
        checks: dict[str, Check],
        hidden: dict[str, Any],
        submission: Submission,
        verdict: Verdict,
    ) -> None:
        count = 0
        for cell in nb.cells:
            if cell.cell_type != "code":
                continue
            count += 1
            cell.execution_count = count
            if is_grade(cell) and not is_solution(cell):
                short = cell.metadata.nbgrader.grade_id
                if short not in checks:
                    raise LookupError(
                        f"the test cell '{short}' has no check of that name in checks.py; "
                        f"there are: {', '.join(checks)}"
                    )
                examined = self._examine(short, checks, hidden, submission, verdict)
                points = float(cell.metadata.nbgrader.points)
                verdict.checks.append(CheckVerdict.of(examined.report, points))
                cell.outputs = graded_outputs(examined.told, verdict.checks[-1].score, count)
            elif EXPLORE in cell.metadata.get("tags", ()):
                cell.outputs = []
            else:
                cell.outputs = cell_outputs(submission.run_cell(cell.source, count))

    def _examine(
        self,
        short: str,
        checks: dict[str, Check],
        hidden: dict[str, Any],
        submission: Submission,
        verdict: Verdict,
    ) -> Examined:
        name = f"{verdict.assignment}/{short}"
        self.log.info("Examining %s", name)
        examined = examine(
            name,
            checks[short],
            submission,
            seed=verdict.seed,
            hidden=hidden.get(short, ()),
            on=self.on or None,  # type: ignore[arg-type]
            progress=lambda result: self.log.debug(
                "  %s %s %s", "✓" if result.passed else "✗", result.name, result.reason
            ),
        )
        for note in examined.notes:
            self.log.error("%s", note)
            verdict.notes.append(note)
        return examined


_warm: dict[tuple[tuple[str, ...], int, bool], SandboxedPlace] = {}


def warm_place(masked: Sequence[str], memory: int, gpus: bool = False) -> SandboxedPlace:
    """Return the sandbox of an assignment: the one that graded the last submission, if any did."""
    key = masked_from(masked), memory, gpus
    if key not in _warm:
        more = gpu_mounts() if gpus else ()
        for place in _warm.values():  # one assignment at a time
            place.close()
        _warm.clear()
        _warm[key] = SandboxedPlace(key[0], BoxLimits(memory=memory), more)
    return _warm[key]


def masked_from(modules: Sequence[str]) -> tuple[str, ...]:
    """Return `modules` and all that comes after the first of them in the course's reading order."""
    rungs = [f"course_lib.{name}" for name in READING_ORDER]
    first = min((rungs.index(name) for name in modules if name in rungs), default=len(rungs))
    return tuple(sorted({*modules, *rungs[first:]}))


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
