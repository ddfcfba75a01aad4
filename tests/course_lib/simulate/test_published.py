"""The published runs: every line is whole, and the errors are what the docs say."""

from __future__ import annotations

from pathlib import Path

import pytest

from course_lib.simulate import CLUSTERS
from course_lib.simulate.cluster import ON_A100, ON_H100
from course_lib.simulate.published import FILE, Validation, device, load, validate
from course_lib.simulate.report import validation_table

DOCS = Path(__file__).parents[3] / "docs/simulator.md"


@pytest.fixture(scope="module")
def result() -> Validation:
    return validate()


def test_there_are_enough_runs_of_enough_sources_each_with_its_own() -> None:
    runs = load()
    assert len(runs) >= 30 and len({run.source for run in runs}) >= 6
    assert len({run.name for run in runs}) == len(runs)
    assert all(run.source and run.seconds > 0 for run in runs)


def test_half_is_predicted_within_the_goal(result: Validation) -> None:
    assert result.median <= 0.10
    assert sum(each.fitted for each in result.predictions) == len(result.predictions) // 2


def test_the_presets_are_what_was_fitted(result: Validation) -> None:
    for name, reached in (("A100", ON_A100), ("H100", ON_H100)):
        assert reached.matmul == pytest.approx(result.fit.matmul[name], abs=0.01)
        assert reached.traffic == pytest.approx(result.fit.shared.traffic, abs=0.1)
        for field in ("inside", "between", "hidden", "waiting"):
            assert getattr(reached, field) == pytest.approx(
                getattr(result.fit.shared, field), abs=0.01
            )
    for cluster in CLUSTERS.values():
        assert cluster.reached == {"A100": ON_A100, "H100": ON_H100}[device(cluster)]


def test_the_docs_have_the_table_as_it_is(result: Validation) -> None:
    assert validation_table(result) in DOCS.read_text()


def test_a_line_that_is_no_run_is_named(tmp_path: Path) -> None:
    lines = FILE.read_text().splitlines()
    broken = tmp_path / "runs.csv"
    broken.write_text("\n".join([*lines[:2], lines[2].replace("selene", "atlantis")]))
    with pytest.raises(ValueError, match=r"runs\.csv, line 3: there is no cluster 'atlantis'"):
        load(broken)
