"""`make bench` runs the benchmarks, and they leave a table and a summary."""

import json
import re
from pathlib import Path

import pytest

from tests.helpers import ROOT

BENCHMARKS = ROOT / "benchmarks"
RESULTS = sorted((BENCHMARKS / "results").glob("*.json"))


def scripts() -> set[str]:
    """Return the names of the benchmarks that run without a GPU."""
    found = {path.stem for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text()}
    return {name for name in found if not name.startswith("gpu")}


def test_make_bench_runs_every_script_and_each_has_its_results() -> None:
    recipe = (ROOT / "Makefile").read_text().partition("\nbench:")[2].partition("\n\n")[0]
    (loop,) = re.findall(r"for each in (.*?);", recipe, re.DOTALL)
    assert set(loop.replace("\\", "").split()) == scripts()
    assert {path.stem for path in RESULTS} == scripts()
    assert all(path.with_suffix(".md").exists() for path in RESULTS)


def test_the_readme_has_a_target_for_every_script() -> None:
    table = re.findall(r"^\| `(\w+)`", (BENCHMARKS / "README.md").read_text(), re.MULTILINE)
    assert set(table) == scripts()


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_are_summaries_with_a_line_for_each_series(path: Path) -> None:
    text = path.read_text()
    series = json.loads(text)["series"]
    assert series
    named = [line for line in text.splitlines() if '"median"' in line]
    assert len(named) == len(series)
    for name, each in series.items():
        assert re.search(r"\((s|ms|MiB|ratio)\)$", name), f"{name}: in what unit?"
        assert {"rounds", "median"} <= each.keys() <= {"rounds", "median", "min", "max"}
        assert each.get("min", each["median"]) <= each["median"] <= each.get("max", each["median"])
