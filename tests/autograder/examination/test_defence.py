"""Questions on a student's own run, in the grader: it runs the code and answers them itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from autograder.examination.defence import answer_to, asked
from autograder.examination.submission import Submission
from autograder.examination.verdict import Verdict
from autograder.passes.examine import Exam, examine_cells
from autograder.sandbox.sandbox import MachineFailure, Sandbox
from course_lib.checking import Wrong
from course_lib.checking.defence import Defence
from course_lib.checking.local import LocalRunner
from course_lib.ranks import RanksError
from tests.helpers.course_folders import SOURCES, needs_sources
from tests.helpers.solutions import checks_of, solution_of

pytestmark = needs_sources

FOLDER = SOURCES / "03_collectives"
OF = "ring_all_reduce"
LOOKS_AROUND = """
def defend_ring_all_reduce():
    import gc, os, sys
    objects = [*os.environ.values(), *gc.get_objects()]
    texts = [str(x) for x in objects if isinstance(x, (str, dict))]
    seen = [t for t in texts if "'asked':" in t or "'about':" in t]
    assert seen, 'nothing to read'
    return 1, [0, 0, 0]
"""

LIES = """
honest = ring_all_reduce
def ring_all_reduce(tensor, group=None):
    from course_lib.ranks.simulated import simulated_group
    simulated_group.own_lines = lambda labels: (("ring_all_reduce", {}),)
    honest(tensor, group)
"""


def graded(place, answers, student="ada", solution="", folder=FOLDER, of=OF):
    """Grade the course's solution, or another one, with these answers; its check has one case."""
    source = nbformat.read(folder / f"{folder.name}.ipynb", as_version=4)
    cells = []
    for cell in source.cells:
        role = cell.metadata.get("nbgrader", {})
        if (role.get("solution") and cell.cell_type == "code") or role.get("grade_id") == "setup":
            cells.append(new_code_cell(cell.source))
    cells += [new_code_cell(text) for text in (solution, answers)]
    for task in (of, f"defend_{of}"):
        role = {"grade": True, "solution": False, "grade_id": task, "points": 2}
        cells.append(new_code_cell("", metadata={"nbgrader": role}))
    checks = dict(checks_of(folder))
    checks[of] = replace(checks[of], cases=checks[of].cases[1:2])
    verdict = Verdict(folder.name, student, folder.name, "seed", "")
    with Submission(place) as submission:
        examine_cells(new_notebook(cells=cells), Exam(checks, ()), submission, verdict)
    return verdict.checks[-1]


def right_answers(student: str, number: int = 1, folder: Path = FOLDER, of: str = OF) -> str:
    checks = checks_of(folder)
    check = checks[f"defend_{of}"]
    assert isinstance(check, Defence)
    with LocalRunner(solution_of(folder, of), "simulated", echo=None) as run:
        _, trace, questions = check.questions(checks[of], run, student, number)
    answers = [answer_to(question, trace)[0] for question in questions]
    return f"def {check.function}():\n    return {number}, {answers}"


@pytest.mark.parametrize(
    ("folder", "of"),
    [
        (FOLDER.name, OF),
        pytest.param("05_bucketing_and_overlap", "data_parallel", marks=pytest.mark.large),
        pytest.param("06_compression", "compressed_all_reduce", marks=pytest.mark.large),
        pytest.param("09_sharding_the_model", "sharded_optimizer", marks=pytest.mark.large),
    ],
)
def test_answers_to_ones_own_questions_earn_the_points(place, folder, of):
    """The sandbox knows the same lines as the ranks of a notebook."""
    task = SOURCES / folder, of
    verdict = graded(place, right_answers("ada", 1, *task), "ada", "", *task)
    assert verdict.score == 2, verdict.cases


def test_the_answers_are_nowhere_in_the_sandbox(place: Sandbox) -> None:
    verdict = graded(place, LOOKS_AROUND)
    assert verdict.score == 0
    assert "nothing to read" in verdict.reason


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("passed", "error", "kind", "says"),
    [
        (False, None, Wrong, f"only about a {OF} that passes its check"),
        (True, RanksError("no rank answers"), Wrong, "in the case of your questions: no rank ans"),
        (True, MachineFailure("the machine is full"), MachineFailure, "the machine is full"),
        (True, KeyError("no such event"), KeyError, "no such event"),
    ],
)
def test_who_is_to_blame_where_nothing_can_be_asked(passed, error, kind, says):
    def fails(*_: Any) -> Any:
        assert error is not None
        raise error

    checks, submission = checks_of(FOLDER), SimpleNamespace(runner=lambda *_: fails, sources=[])
    check: Any = checks[f"defend_{OF}"]
    with pytest.raises(kind, match=says):
        questions = asked(check, checks[OF], passed, submission, None, "ada")
        assert kind is Wrong  # anybody else's fault is told at once
        questions.judge(questions.cases[0], [], [])


@pytest.mark.parametrize(
    ("line", "says"), [(2, "your own run shows"), (9999, "so there is nothing to ask")]
)
def test_a_solution_that_lies_about_its_lines_changes_its_own_questions(place, line, says):
    """The ranks' process says the lines. Who lies there must answer other questions, or none."""
    verdict = graded(place, right_answers("ada"), solution=LIES.format(line))
    assert verdict.score < 2 and says in verdict.reason, verdict.cases
