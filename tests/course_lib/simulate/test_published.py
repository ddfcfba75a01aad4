"""The published runs: every line is whole, and the errors are what the docs say."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from course_lib.simulate.published import FILE, held, load
from course_lib.simulate.report import memory_table, runs_table
from tests.helpers import ROOT


def test_there_are_enough_runs_of_enough_sources_each_with_its_own() -> None:
    runs = load()
    assert len(runs) >= 30 and len({run.group for run in runs}) >= 6
    assert len({run.name for run in runs}) == len(runs)
    assert all(run.source and run.group and run.seconds > 0 for run in runs)


def test_runs_are_predicted_within_the_goal() -> None:
    sizes = [abs(run.error) for run in load() if not run.excluded]
    assert median(sizes) <= 0.08
    assert sum(size <= 0.25 for size in sizes) >= 0.95 * len(sizes)


def test_the_docs_have_the_tables_as_they_are() -> None:
    docs = (ROOT / "docs" / "simulator.md").read_text(encoding="utf-8")
    assert runs_table(load()) in docs and memory_table(held()) in docs


def test_a_line_that_is_no_run_is_named(tmp_path: Path) -> None:
    lines = FILE.read_text().splitlines()
    broken = tmp_path / "runs.csv"
    broken.write_text("\n".join([*lines[:2], lines[2].replace("selene", "atlantis")]))
    with pytest.raises(ValueError, match=r"runs\.csv, line 3: there is no cluster 'atlantis'"):
        load(broken)
