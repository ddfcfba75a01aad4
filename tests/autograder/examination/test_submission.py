"""A submission in its sandbox: from the first cell to the end of all that it started.

`test_handed_in.py` has what students hand in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import create_autospec

import pytest

from autograder.course import Settings
from autograder.examination.submission import Submission
from autograder.sandbox import sandbox as sandbox_module
from autograder.sandbox.sandbox import MachineFailure, Sandbox
from course_lib.checking import CheckReport, run_check
from tests.autograder.examination.test_handed_in import total

RIGHT = """
import torch.distributed as dist

def total(mine):
    dist.all_reduce(mine)
    return mine
"""


@pytest.fixture
def examination(place: Sandbox) -> Iterator[Submission]:
    with Submission(place, Settings(cell_seconds=5)) as examination:
        yield examination


def report(examination: Submission, source: str, *world_sizes: int) -> CheckReport:
    examination.run_cell(source)
    return run_check("t/total", total("total", 20, *world_sizes), examination.runner(), seed="s")


def test_what_cannot_be_handed_over_is_told_with_the_reason_and_not_asked_for_in_every_case(
    examination: Submission, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = create_autospec(Submission._start_notebook, side_effect=Submission._start_notebook)
    monkeypatch.setattr(Submission, "_start_notebook", start)
    ends = "class Ends:\n    def __reduce__(self):\n        import os; os._exit(5)\nends = Ends()\n"
    body = "def total(mine):\n    return ends\n"
    reason = report(examination, ends + body, 1, 2, 3, 4).reason
    assert "total could not be read from the notebook" in reason
    assert "exit with status 5. All global names that the function uses" in reason
    assert start.call_count == 1
    # After a later cell, which may mend it, it is asked for again.
    assert report(examination, RIGHT, 2).passed


def test_a_grader_that_cannot_start_is_not_a_zero_and_says_why(monkeypatch: Any) -> None:
    monkeypatch.setattr(sandbox_module, "_path", lambda: "/nowhere")
    with (
        Sandbox() as place,
        Submission(place) as examination,
        pytest.raises(MachineFailure, match="No module named"),
    ):
        examination.run_cell("x = 1")


def test_exploration_has_a_time_of_its_own_and_is_interrupted(place: Sandbox) -> None:
    slow = "import time\nseen = [*globals().get('seen', []), 1]\ntime.sleep(60)"
    with Submission(place, Settings(cell_seconds=1, submission_seconds=3)) as submission:
        assert submission.run_cell("x = 20").error == ""
        outcomes = [submission.run_cell(slow, exploring=True) for _ in range(4)]
        assert all("was interrupted" in outcome.error for outcome in outcomes)
        assert submission.exploration.left == 0
        assert submission.run_cell("print(x, len(seen))", exploring=True).stdout == "20 4\n"
        assert report(submission, RIGHT, 2).passed
