"""Rebuild and examine one notebook: run its cells, and give each test cell its points.

Code cells of the rebuilt notebook are run in the sandbox. A test cell is *not* run: its grade id
names a check. The examiner runs that check's public and hidden cases on ranks in the sandbox and
carries their messages. It judges the values that they return, and writes the cell's outputs itself.
nbgrader's own `SaveAutoGrades` then reads the points from these outputs, as always.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_output
from nbgrader.utils import is_solution

from autograder.collection import repair
from autograder.course import Folders, Settings, handed_out
from autograder.examination.defence import asked
from autograder.examination.gpus import gpu_access, with_gpus
from autograder.examination.submission import CellOutcome, Submission, Taken, examine
from autograder.examination.verdict import (
    CheckVerdict,
    Verdict,
    assignment_secret,
    checks_digest,
    class_seed,
    for_the_student,
    notes_on,
    source_digest,
    submission_seed,
    versions,
)
from autograder.files import write_whole
from autograder.sandbox.bubblewrap import HardLimits
from autograder.sandbox.mounts import Mount
from autograder.sandbox.sandbox import Sandbox
from course_lib import READING_ORDER
from course_lib.checking import Case, Check, CheckReport
from course_lib.checking.cases import AuthorError
from course_lib.checking.defence import Defence
from course_lib.checking.loading import load_checks, load_module
from course_lib.learner.what_counts import grade_id, is_check, is_run, pictures_in, rebuild

MAX_OUTPUT = 2 * 2**20
"""Characters of all cells' outputs together. A notebook is stored several times, and shown."""
_TOO_LONG = (
    f"The outputs of this notebook are longer than {MAX_OUTPUT:,} characters together: "
    "those of this cell were left out.\n"
)


def rebuilt(folders: Folders, path: Path) -> NotebookNode:
    """Return the released notebook with the sources of a submitted one.

    Any editor may have changed a submitted file: cells copied, deleted, renamed, tagged, or with a
    different type. nbgrader trusts the file's structure. If the structure is wrong, nbgrader loses
    marks, the submission or the whole batch. So the notebook is made anew, by the rule that
    ``course check`` has too: `course_lib.learner.what_counts`.

    Args:
        folders: the course's folders.
        path: the submitted notebook: STUDENT/ASSIGNMENT/NOTEBOOK.ipynb.

    Raises:
        FileNotFoundError: the assignment was not released.

    """
    released = folders.release / path.parent.name / path.name
    if not released.is_file():
        raise FileNotFoundError(
            f"there is no released version at {released}: "
            f"run nbgrader generate_assignment {path.parent.name}"
        )
    handout, submitted = (nbformat.read(file, as_version=4) for file in (released, path))
    return rebuild(handout, submitted, pictures_in(path.parent))


def blank_verdict(nb: NotebookNode, folders: Folders, path: Path, settings: Settings) -> Verdict:
    """Return the verdict on a rebuilt notebook, before anything of it is run.

    Args:
        nb: the rebuilt notebook.
        folders: the course's folders.
        path: the submitted notebook: STUDENT/ASSIGNMENT/NOTEBOOK.ipynb.
        settings: how it is to be examined.

    """
    student, assignment, notebook = path.parents[1].name, path.parent.name, path.stem
    digest = source_digest([cell.source for cell in nb.cells if cell.cell_type == "code"])
    secret = assignment_secret(folders.data, assignment)
    return Verdict(
        assignment=assignment,
        student=student,
        notebook=notebook,
        seed=submission_seed(secret, student, notebook, digest),
        class_seed=class_seed(secret),
        source_sha256=digest,
        versions=versions(),
        notes=[*repair.notes.get((student, assignment), ()), *nb.metadata.get("rebuild", ())],
        checks_sha256=checks_digest(
            folders.source / assignment, folders.release / assignment / path.name
        ),
        settings=asdict(settings),
        host=platform.node(),
    )


@dataclass(frozen=True)
class Exam:
    """The parts that are needed to examine the submissions of an assignment.

    Attributes:
        checks: grade id of a test cell → its check, with the cases that students do not get.
        masked: modules that contain the answers.

    """

    checks: dict[str, Check]
    masked: tuple[str, ...]

    @classmethod
    def of(cls, source: Path) -> Exam:
        """Return the exam of the assignment in the folder `source`, under ``instructor/``."""
        checks = dict(load_checks(handed_out(source) / "checks.py"))
        hidden = load_module(source / "hidden.py", handed_out(source))
        for task, listed in getattr(hidden, "HIDDEN", {}).items():
            checks[task] = with_hidden(checks[task], listed)
        return cls(checks, tuple(hidden.MASKED))

    def sandbox(self, settings: Settings) -> Sandbox:
        """Return the sandbox that examines submissions; it keeps running between submissions.

        Raises:
            SandboxUnavailable: the sandbox is new, and nothing can be graded in it.

        """
        memory, gpus = int(settings.memory_gib * 2**30), settings.on == "gpu"
        key = masked_from(self.masked), memory, gpus
        if key not in _warm:
            limits, mounts, environment = HardLimits(memory=memory), list[Mount](), dict[str, str]()
            if gpus:
                mounts, environment = gpu_access()
                limits = with_gpus(limits)
            for sandbox in _warm.values():  # keep one assignment's sandbox only
                sandbox.close()
            _warm.clear()
            sandbox = Sandbox(key[0], limits, mounts, environment)
            sandbox.make_ready()
            _warm[key] = sandbox
        return _warm[key]


def with_hidden(check: Check, listed: Sequence[Case]) -> Check:
    """Return the check with `listed` hidden cases in front of those that a secret gives."""
    return replace(check, hidden=lambda secret: (*listed, *check.hidden(secret)))


def examine_notebook(nb: NotebookNode, exam: Exam, verdict: Verdict) -> None:
    """Run a rebuilt notebook's cells and checks; write outputs into it, and fill its verdict.

    Args:
        nb: the rebuilt notebook.
        exam: the exam of its assignment.
        verdict: a blank verdict, whose seed and settings are used.

    Raises:
        MachineFailure: the machine or our own code failed, so there is no verdict.
        SandboxUnavailable: there is no sandbox.
        AuthorError: a check is broken, or a test cell has none.

    """
    start = time.monotonic()
    settings = Settings(**verdict.settings)
    sandbox = exam.sandbox(settings)
    sandbox.warm()  # before the submission's time starts
    with Submission(sandbox, settings) as submission:
        examine_cells(nb, exam, submission, verdict)
    for note in (
        submission.exploration.told_when_over("exploration in other cells"),
        submission.budget.told_when_over(),
    ):
        verdict.notes += [note] if note is not None else []
    verdict.seconds = time.monotonic() - start


def examine_cells(nb: NotebookNode, exam: Exam, submission: Submission, verdict: Verdict) -> None:
    """Run all cells one by one, then all checks; give each test cell its report and points.

    Each function is taken from the notebook where its test cell is, so a later cell cannot change
    what is graded.
    """
    start, room, checks = time.monotonic(), MAX_OUTPUT, exam.checks
    with_hidden_cases = Settings(**verdict.settings).hidden
    tests: list[tuple[NotebookNode, Taken]] = []
    count = 0
    for cell in nb.cells:
        if cell.cell_type != "code":
            continue
        count += 1
        cell.execution_count = count
        if is_check(cell):
            if (name := grade_id(cell)) not in checks:
                raise AuthorError(
                    f"the test cell '{name}' has no check with this name in checks.py; "
                    f"the names there are: {', '.join(checks)}"
                )
            tests.append((cell, submission.take(checks[name].function)))
        elif not is_run(cell):
            cell.outputs = []
        else:
            outcome = submission.run_cell(cell.source, count, exploring=not is_solution(cell))
            cell.outputs = cell_outputs(outcome)
            room -= sum(len(str(output)) for output in cell.outputs)
            if room < 0:
                cell.outputs = [new_output("stream", name="stderr", text=_TOO_LONG)]
    verdict.timings["cells"] = time.monotonic() - start
    functions = {grade_id(cell): function for cell, function in tests}
    for cell, function in tests:
        start, name = time.monotonic(), grade_id(cell)
        check = checks[name]
        if isinstance(check, Defence):
            passed = any(c.task == check.of and c.score == c.max_score for c in verdict.checks)
            about, solution = checks[check.of], functions.get(check.of)
            check = asked(check, about, passed, submission, solution, verdict.student)
        report = examine(
            f"{verdict.assignment}/{name}",
            check,
            submission,
            seed=verdict.seed,
            hidden=checks[name].hidden(verdict.class_seed) if with_hidden_cases else (),
            on=verdict.settings.get("on") or None,
            payload=function,
        )
        verdict.notes += notes_on(report)
        points = float(cell.metadata.nbgrader.points)
        verdict.checks.append(CheckVerdict.of(report, points))
        score = verdict.checks[-1].score
        cell.outputs = graded_outputs(for_the_student(report), score, cell.execution_count)
        verdict.timings[name] = verdict.timings.get(name, 0.0) + time.monotonic() - start


def keep(nb: NotebookNode, verdict: Verdict, folders: Folders) -> None:
    """Write a graded notebook, then its verdict: whoever reads the verdict finds the notebook."""
    write_whole(verdict.kept_in(folders).with_suffix(".ipynb"), nbformat.writes(nb))
    verdict.write(verdict.kept_in(folders))


_warm: dict[tuple[tuple[str, ...], int, bool], Sandbox] = {}


def masked_from(modules: Sequence[str]) -> tuple[str, ...]:
    """Return `modules` and all modules after the first of them in the course's reading order."""
    rungs = [f"course_lib.{name}" for name in READING_ORDER]
    first = min((rungs.index(name) for name in modules if name in rungs), default=len(rungs))
    return tuple(sorted({*modules, *rungs[first:]}))


def graded_outputs(report: CheckReport, score: float, count: int) -> list[NotebookNode]:
    """Return a test cell's outputs: the report, and the points in the form that nbgrader reads.

    The points are always written, because nbgrader gives full points to a cell without a result.
    """
    return [
        new_output("stream", name="stdout", text=f"{report}\n"),
        new_output("execute_result", {"text/plain": repr(float(score))}, execution_count=count),
    ]


def cell_outputs(outcome: CellOutcome) -> list[NotebookNode]:
    """Return a code cell's outputs as plain text only, even if the student displayed more."""
    outputs = []
    for name in ("stdout", "stderr"):
        if text := getattr(outcome, name):
            outputs.append(new_output("stream", name=name, text=text))
    if outcome.error:
        kind, _, message = outcome.error.partition(": ")
        trace = outcome.trace or outcome.error
        outputs.append(new_output("error", ename=kind, evalue=message, traceback=[trace]))
    return outputs
