"""Questions on a student's own run, in the grader: it runs the code and answers them itself."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from autograder.examination.submission import Submission
from autograder.examination.verdict import CheckVerdict, Verdict
from autograder.passes.examine import Exam, examine_cells
from autograder.sandbox.sandbox import Sandbox
from course_lib.checking.defence import Defence
from course_lib.checking.local import LocalRunner
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


def graded(
    place: Sandbox,
    answers: str,
    student: str = "ada",
    solution: str = "",
    folder: Path = FOLDER,
    of: str = OF,
) -> CheckVerdict:
    """Grade the course's solution of the task, or another one, with these answers."""
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
    verdict = Verdict(folder.name, student, folder.name, "seed", "")
    with Submission(place) as submission:
        exam = Exam(checks_of(folder), {}, ())
        examine_cells(new_notebook(cells=cells), exam, submission, verdict)
    return verdict.checks[-1]


def right_answers(student: str, number: int = 1, folder: Path = FOLDER, of: str = OF) -> str:
    checks = checks_of(folder)
    check = checks[f"defend_{of}"]
    assert isinstance(check, Defence)
    with LocalRunner(solution_of(folder, of), "simulated", echo=None) as run:
        questions = check.questions(checks[of], run, student, number)[1]
    answers = [question.right for question in questions]
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
def test_answers_to_ones_own_questions_earn_the_points(
    place: Sandbox, folder: str, of: str
) -> None:
    """The sandbox knows the same lines as the ranks of a notebook."""
    task = SOURCES / folder, of
    verdict = graded(place, right_answers("ada", 1, *task), "ada", "", *task)
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
