"""The self-test: solutions with known points, graded like a student's in the same sandbox.

A machine can be broken in ways that nobody has thought of. Then it takes points from right
solutions, or gives points to wrong ones, and nothing raises an error. The self-test reveals this.
It is a submission of the same assignment with three functions: the instructor's solution, a
function that returns nothing, and a function that ends its process. It is rebuilt from the released
notebook, its cells run in the sandbox that grades the class, and its functions run on ranks there.
The first must get all points, the second fewer, and the third none.
These points follow from how the functions are made, so no number is written down.

All three functions are in one notebook and solve the same task, so its cells run only once. The
task's check keeps one public and one hidden case. This takes about a second, once in each sandbox.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell
from nbgrader.utils import is_grade, is_solution

from autograder.course import Settings
from autograder.examination.verdict import CheckVerdict, Verdict
from autograder.passes.examine import Exam, examine_notebook
from autograder.sandbox.sandbox import MachineFailure
from course_lib.checking import Check
from course_lib.checking.defence import Defence
from course_lib.learner.what_counts import grade_id, is_check, rebuild

_WRONG = "def {name}(*args, **kwargs):\n    return None\n"
_CRASHING = "import os\n\n\ndef {name}(*args, **kwargs):\n    os._exit(3)\n"


def known_solutions(exam: Exam, source: Path, released: Path) -> tuple[NotebookNode, Exam] | None:
    """Return a notebook with three solutions of one task, and the exam of only this task.

    The task is the cheapest whose ranks send messages, or else the cheapest; None if none gives
    points. Questions on another task's run are left out, because each student has their own.

    Args:
        exam: the exam of the assignment.
        source: its folder under ``instructor/``.
        released: the folder with the notebooks that students were given.

    """
    candidates: list[tuple[bool, int, str, Path, Check]] = []
    for path in sorted(released.glob("*.ipynb")):
        for cell in filter(is_check, nbformat.read(path, as_version=4).cells):
            task = grade_id(cell)
            if task in exam.checks and not isinstance(exam.checks[task], Defence):
                check = _short(exam.checks[task])
                sizes = [case.world_size for case in (*check.cases, *check.hidden(""))]
                candidates.append((max(sizes, default=1) < 2, sum(sizes), task, path, check))
    if not candidates:
        return None
    _, _, task, path, check = min(candidates, key=lambda candidate: candidate[:2])
    handout, solution = (nbformat.read(file, as_version=4) for file in (path, source / path.name))
    nb = rebuild(handout, solved(handout, solution))
    nb.cells = _with_three(nb.cells, task, check.function)
    return nb, replace(exam, checks={task: check})


def wrong_points(checks: Sequence[CheckVerdict]) -> str:
    """Return a sentence on the first solution that got wrong points, or an empty string."""
    right, empty, crashing = checks
    for subject, check, as_it_must_be in (
        ("a right solution", right, right.score == right.max_score),
        ("a function that returns nothing", empty, empty.score < empty.max_score),
        ("a function that ends its process", crashing, crashing.score == 0),
    ):
        if not as_it_must_be:
            reason = " ".join(check.reason.split())[:300]
            because = f" ({reason})" if reason else ""
            points = f"{check.score:g} of {check.max_score:g} points"
            return f"{subject} got {points} in {check.task}{because}"
    return ""


def solved(
    released: NotebookNode, solution: NotebookNode, instead: Mapping[str, str] | None = None
) -> NotebookNode:
    """Return the released notebook with the solution's code in it.

    Args:
        released: the students' version.
        solution: the instructor's version.
        instead: grade id → code to use in place of the solution's.

    """
    sources = {
        grade_id(cell): re.sub(r" *### (BEGIN|END) SOLUTION\n?", "", cell.source)
        for cell in solution.cells
        if is_solution(cell)
    }
    sources |= instead or {}
    notebook = copy.deepcopy(released)
    for cell in notebook.cells:
        if is_solution(cell) and not is_grade(cell):
            cell.source = sources.get(grade_id(cell), cell.source)
    return notebook


def _with_three(cells: Iterable[NotebookNode], task: str, function: str) -> list[NotebookNode]:
    """Return the cells up to and including the task's test, and two other functions with tests."""
    first_cells: list[NotebookNode] = []
    for cell in cells:
        if not is_check(cell):
            first_cells.append(cell)
        elif grade_id(cell) == task:
            first_cells.append(copy.deepcopy(cell))
            for code in (_WRONG, _CRASHING):
                first_cells += [new_code_cell(code.format(name=function)), copy.deepcopy(cell)]
            break
    return first_cells


def _short(check: Check) -> Check:
    """Return the check with one public and one hidden case, on several ranks if possible."""
    public, hidden = (
        tuple(([case for case in cases if case.world_size > 1] or list(cases))[:1])
        for cases in (check.cases, check.hidden("self-test"))
    )
    return replace(check, cases=public, hidden=lambda _: hidden)


class SelfTest:
    """The self-test of an assignment.

    Args:
        source: the assignment's folder under ``instructor/``.
        released: the folder with the notebooks that students were given.
        settings: how the class is examined; the known solutions are examined in the same way.

    """

    def __init__(self, source: Path, released: Path, settings: Settings) -> None:
        self._source, self._released, self._settings = source, released, settings

    def examine(self, nb: NotebookNode, verdict: Verdict) -> None:
        """Examine a rebuilt notebook in a sandbox that has passed the test; fill its verdict.

        Raises:
            MachineFailure: the machine or our own code failed, or the test did.
            SandboxUnavailable: there is no sandbox.
            AuthorError: a check is broken, or a test cell has none.

        """
        exam = Exam.of(self._source)
        if not self._trusts(exam):
            self.run()
        examine_notebook(nb, exam, verdict)
        if not self._trusts(exam):
            raise MachineFailure("The sandbox ended while this submission was graded")

    def _trusts(self, exam: Exam) -> bool:
        """Return whether the running sandbox has passed this test; start one if none runs."""
        sandbox = exam.sandbox(self._settings)
        sandbox.warm()
        return sandbox.passed is self

    def run(self) -> None:
        """Grade the known solutions with the checks as they are now; then trust this sandbox.

        Raises:
            MachineFailure: they got wrong points, and the next sandbox will be a new one; or the
                sandbox cannot be started, or has ended.
            SandboxUnavailable: there is no sandbox.
            AuthorError: the check is broken.

        """
        exam = Exam.of(self._source)
        solutions = known_solutions(exam, self._source, self._released)
        sandbox = exam.sandbox(self._settings)
        sandbox.warm()
        sandbox.passed = None
        if solutions is not None:
            verdict = Verdict(
                self._source.name,
                student="self-test",
                notebook="self-test",
                seed="self-test",
                source_sha256="",
                settings=asdict(self._settings),
            )
            examine_notebook(*solutions, verdict)
            if mistake := wrong_points(verdict.checks):
                sandbox.close()
                raise MachineFailure(
                    f"{mistake}. So this machine, or the check, is broken. Test the machine with: "
                    "autograder doctor; and test the check with: make test-all "
                    f'ARGS="tests/test_assignments.py -k {self._source.name}"'
                )
        sandbox.passed = self
