"""The demonstration, end to end: nbgrader's own steps, our passes, scores and feedback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest

from autograder.commands import demo as demo_module
from autograder.commands.demo import demo
from tests.helpers.course_folders import needs_sources

pytestmark = [
    needs_sources,
    pytest.mark.filterwarnings("ignore"),  # nbgrader's, and what it stands on
]
SCORES = {"right-differently": 5, "deadlock": 2}
"""Two of its six submissions; the class of `whole_class` has the others."""


def test_the_scores_are_right_and_every_lost_point_has_its_reason(
    released_course: Path, copy_of: Callable[[Path], Path], monkeypatch, capsys
) -> None:
    make = demo_module.make_submissions

    def some(source: Path, released: Path) -> dict[str, nbformat.NotebookNode]:
        submissions = make(source, released)
        assert len(submissions) == 6
        return {name: submissions[name] for name in SCORES}

    monkeypatch.setattr(demo_module, "make_submissions", some)
    verdicts = {verdict.student: verdict for verdict in demo(copy_of(released_course))}
    assert capsys.readouterr().out.count("\ngrading ") == len(SCORES)
    assert {name: row.score for name, row in verdicts.items()} == SCORES
    assert {row.max_score for row in verdicts.values()} == {5}
    assert verdicts["right-differently"].reason == ""
    deadlock = verdicts["deadlock"].reason
    assert "Rank 0 waits in recv from rank 1" in deadlock
    assert "Rank 1 waits in recv from rank 0" in deadlock
