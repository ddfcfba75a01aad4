"""Attacks on a check that runs other people's solutions, and on what a whole assignment mounts."""

from __future__ import annotations

import pytest

from autograder.commands.demo import ASSIGNMENT
from autograder.course import Settings
from autograder.examination.submission import Submission, examine
from autograder.sandbox.sandbox import Sandbox
from tests.helpers.course_folders import SOURCES, needs_sources
from tests.helpers.solutions import checks_of, code_cells

SURVIVES = "a wrong solution survives your check"
COUNTS = """
import os
def is_right(average):
    open("/tmp/count", "a").write("x")
    assert os.path.getsize("/tmp/count") == 1, "the second one"
    return True
"""
READS = """
import gc, sys
def is_right(average):
    texts = [x for x in gc.get_objects() if isinstance(x, dict) and "source" in x]
    found = [str(x["source"]) for x in texts if "all_" in str(x["source"])]
    f = sys._getframe()
    while f := f.f_back:
        found += [str(v) for v in f.f_locals.values() if "all_gather(" in str(v)]
    assert found, "nothing to read"
    return ".mean(0)" in found[0]
"""
SPIES = """
class Spy:
    def __reduce__(self):
        program = "__import__('torch').distributed.get_rank() and open('/dev/shm/spy', 'w') and 1/0"
        return eval, (f"{program} or 0",)
spy = Spy()
def is_right(average):
    assert spy == 0
    return bool(__import__("glob").glob("/dev/shm/spy"))
"""
LOOKS = """
import course_lib, pathlib
def is_right(average):
    places = [pathlib.Path("/exam"), *map(pathlib.Path, course_lib.__path__)]
    texts = [path.read_text() for place in places for path in place.rglob("*.py")]
    assert len(texts) > 9
    assert any("def sends_at_most" in text for text in texts), "no judges"
"""


@needs_sources
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (COUNTS, SURVIVES),
        (READS, SURVIVES),
        (SPIES, "refuses a right solution"),
        (LOOKS, "no judges"),
    ],
    ids=["counts solutions", "reads the solution", "is on the other ranks", "looks for judges"],
)
def test_a_check_that_looks_elsewhere_than_at_results_earns_nothing(place, source, reason):
    folder = SOURCES / ASSIGNMENT
    check = checks_of(folder)["is_right"]
    with Submission(place, Settings(case_seconds=8)) as submission:
        for cell in (next(code_cells(folder)).source, source):
            assert not submission.run_cell(cell).error
        report = examine(f"{ASSIGNMENT}/is_right", check, submission, seed="seed")
    assert report.fraction == 0, str(report)
    assert any(reason in result.reason for result in report.results), str(report)


def test_one_student_takes_a_minute_at_most(place: Sandbox) -> None:
    with Submission(place, Settings(submission_seconds=3)) as submission:
        assert "took longer than 3 s" in submission.run_cell("while True: pass").error
        assert "used up its time limit of 3 s" in submission.run_cell("x = 1").error
    assert submission.budget.left <= 0
