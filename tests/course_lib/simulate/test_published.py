"""The published runs: the errors are those that the docs name."""

from statistics import median

from course_lib.simulate.published import load
from course_lib.simulate.report import runs_table
from tests.helpers import ROOT


def test_runs_are_predicted_within_the_goal() -> None:
    sizes = [abs(run.error) for run in load() if not run.excluded]
    assert median(sizes) <= 0.08
    assert sum(size <= 0.25 for size in sizes) >= 0.95 * len(sizes)


def test_the_docs_have_the_table_as_it_is() -> None:
    docs = (ROOT / "docs" / "simulator.md").read_text(encoding="utf-8")
    assert runs_table(load()) in docs
