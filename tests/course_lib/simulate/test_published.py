"""The published runs: every line is whole, and the errors are what the docs say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from course_lib.simulate import CLUSTERS
from course_lib.simulate.cluster import ON_A100, ON_H100
from course_lib.simulate.published import (
    FILE,
    Validation,
    device,
    held,
    load,
    validate,
)
from course_lib.simulate.report import memory_table, runs_table, sources_table

DOCS = Path(__file__).parents[3] / "docs/simulator.md"


@pytest.fixture(scope="module")
def result() -> Validation:
    return validate()


def test_there_are_enough_runs_of_enough_sources_each_with_its_own() -> None:
    runs = load()
    assert len(runs) >= 30 and len({run.group for run in runs}) >= 6
    assert len({run.name for run in runs}) == len(runs)
    assert all(run.source and run.group and run.seconds > 0 for run in runs)


def test_sources_that_were_left_out_are_predicted_within_the_goal(result: Validation) -> None:
    assert result.median <= 0.12 and result.median_of_groups <= 0.12
    sizes = [abs(each.error) for each in result.counted]
    assert sum(size <= 0.25 for size in sizes) >= 0.75 * len(sizes)


def test_a_prediction_uses_no_run_of_its_own_source() -> None:
    """Twice as long runs of one source change the fit to all, and not their own prediction."""
    runs = [run for run in load() if run.group in ("Korthikanti", "IBM", "Llama 3")]
    slower = [
        replace(run, reported=2 * run.reported) if run.group == "Korthikanti" else run
        for run in runs
    ]
    before, after = validate(runs), validate(slower)
    for one, other in zip(before.predictions, after.predictions, strict=True):
        if one.run.group == "Korthikanti":
            assert other.left_out == pytest.approx(one.left_out, rel=1e-12)
    assert before.fit != after.fit


def test_the_presets_are_what_was_fitted(result: Validation) -> None:
    for name, reached in (("A100", ON_A100), ("H100", ON_H100)):
        assert reached.matmul == pytest.approx(result.fit.matmul[name], abs=0.01)
        assert reached.eager == pytest.approx(result.fit.shared["eager"], abs=0.2)
        assert reached.tensor_hidden == pytest.approx(result.fit.shared["tensor_hidden"], abs=0.05)
    for cluster in CLUSTERS.values():
        assert cluster.reached == {"A100": ON_A100, "H100": ON_H100}[device(cluster)]


def test_the_docs_have_the_tables_as_they_are(result: Validation) -> None:
    docs = DOCS.read_text()
    assert sources_table(result) in docs and runs_table(result) in docs
    assert memory_table(held()) in docs


def test_a_line_that_is_no_run_is_named(tmp_path: Path) -> None:
    lines = FILE.read_text().splitlines()
    broken = tmp_path / "runs.csv"
    broken.write_text("\n".join([*lines[:2], lines[2].replace("selene", "atlantis")]))
    with pytest.raises(ValueError, match=r"runs\.csv, line 3: there is no cluster 'atlantis'"):
        load(broken)
