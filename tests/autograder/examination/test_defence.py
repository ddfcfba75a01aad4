"""Questions on a student's own run, in the grader: it runs the code and answers them itself."""

from __future__ import annotations

import logging

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from autograder.examination.submission import Submission
from autograder.examination.verdict import CheckVerdict, Verdict
from autograder.passes.examine import examine_cells
from autograder.sandbox.sandbox import Sandbox
from course_lib.checking.defence import Defence
from course_lib.checking.local import LocalRunner
from tests.helpers.course_folders import SOURCES, needs_sources
from tests.helpers.solutions import checks_of, solution_of

pytestmark = needs_sources

FOLDER = SOURCES / "03_collectives"
CHECKS = checks_of(FOLDER)
OF, TASK = "ring_all_reduce", "defend_ring_all_reduce"
LOOKS_AROUND = """
def defend_ring_all_reduce():
    import gc, os, sys
    objects = [*os.environ.values(), *gc.get_objects()]
    texts = [str(x) for x in objects if isinstance(x, (str, dict))]
    seen = [t for t in texts if "'right':" in t]
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


def graded(place: Sandbox, answers: str, student: str = "ada", solution: str = "") -> CheckVerdict:
    """Grade the course's solution of the task, or another one, with these answers."""
    source = nbformat.read(FOLDER / f"{FOLDER.name}.ipynb", as_version=4)
    cells = []
    for cell in source.cells:
        role = cell.metadata.get("nbgrader", {})
        if (role.get("solution") and cell.cell_type == "code") or role.get("grade_id") == "setup":
            cells.append(new_code_cell(cell.source))
    cells += [new_code_cell(text) for text in (solution, answers)]
    for task in (OF, TASK):
        role = {"grade": True, "solution": False, "grade_id": task, "points": 2}
        cells.append(new_code_cell("", metadata={"nbgrader": role}))
    verdict = Verdict(FOLDER.name, student, FOLDER.name, "seed", "")
    with Submission(place) as submission:
        examine_cells(
            new_notebook(cells=cells), CHECKS, {}, submission, verdict, logging.getLogger()
        )
    return verdict.checks[-1]


def right_answers(student: str, number: int = 1) -> str:
    check = CHECKS[TASK]
    assert isinstance(check, Defence)
    with LocalRunner(solution_of(FOLDER, OF), "simulated", echo=None) as run:
        questions = check.questions(CHECKS[OF], run, student, number)[1]
    answers = [question.right for question in questions]
    return f"def {TASK}():\n    return {number}, {answers}"


def test_answers_to_ones_own_questions_earn_the_points(place: Sandbox) -> None:
    verdict = graded(place, right_answers("ada"))
    assert verdict.score == 2, verdict.cases


@pytest.mark.large
def test_the_second_set_earns_half(place: Sandbox) -> None:
    assert graded(place, right_answers("ada", 2)).score == 1


@pytest.mark.large
def test_a_neighbours_answers_earn_a_third_at_most(place: Sandbox) -> None:
    verdict = graded(place, right_answers("ada"), student="bob")
    assert verdict.score <= 2 / 3
    assert "your own run shows" in verdict.reason


def test_the_answers_are_nowhere_in_the_sandbox(place: Sandbox) -> None:
    verdict = graded(place, LOOKS_AROUND)
    assert verdict.score == 0
    assert "nothing to read" in verdict.reason


@pytest.mark.large
def test_a_wrong_solution_is_not_asked_about(place: Sandbox) -> None:
    wrong = f"def {OF}(tensor, group=None):\n    pass"
    verdict = graded(place, right_answers("ada"), solution=wrong)
    assert verdict.score == 0
    assert "only about a ring_all_reduce that passes its check" in verdict.reason


@pytest.mark.parametrize(
    ("line", "says"), [(2, "your own run shows"), (9999, "so there is nothing to ask")]
)
def test_a_solution_that_lies_about_its_lines_changes_its_own_questions(
    place: Sandbox, line: int, says: str
) -> None:
    """The ranks' process says the lines. Who lies there must answer other questions, or none."""
    verdict = graded(place, right_answers("ada"), solution=LIES.format(line))
    assert verdict.score < 2 and says in verdict.reason, verdict.cases
