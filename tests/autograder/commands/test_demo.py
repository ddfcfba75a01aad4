"""The demonstration, end to end: nbgrader's own steps, our passes, scores and feedback."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest

from autograder.commands import demo as demo_module
from autograder.commands.demo import demo
from autograder.examination.verdict import Verdict
from tests.helpers.course_folders import needs_sources

pytestmark = [
    needs_sources,
    pytest.mark.filterwarnings("ignore"),  # nbgrader's, and what it stands on
]
SCORES = {"right-differently": 5, "deadlock": 2}
"""Two of its six submissions; the class of `whole_class` has the others."""


@pytest.fixture(scope="module")
def results(released_course: Path, copy_of: Callable[[Path], Path]) -> dict[str, Verdict]:
    """Run the demonstration with some of its submissions."""
    make = demo_module.make_submissions

    def some(source: Path, released: Path) -> dict[str, nbformat.NotebookNode]:
        submissions = make(source, released)
        assert len(submissions) == 6
        return {name: submissions[name] for name in SCORES}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_module, "make_submissions", some)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            verdicts = demo(copy_of(released_course))
    assert out.getvalue().count("\ngrading ") == len(SCORES)
    return {verdict.student: verdict for verdict in verdicts}


def test_the_scores_are_right_and_every_lost_point_has_its_reason(results) -> None:
    assert {name: row.score for name, row in results.items()} == SCORES
    assert {row.max_score for row in results.values()} == {5}
    assert results["right-differently"].reason == ""
    deadlock = results["deadlock"].reason
    assert "Rank 0 waits in recv from rank 1" in deadlock
    assert "Rank 1 waits in recv from rank 0" in deadlock
