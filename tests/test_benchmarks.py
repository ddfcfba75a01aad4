"""`make bench` runs the benchmarks, and each leaves its tables."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.helpers import ROOT
from tests.helpers.kernels import alive

BENCHMARKS = ROOT / "benchmarks"
RESULTS = sorted((BENCHMARKS / "results").glob("*.md"))


def scripts() -> set[str]:
    """Return the names of the benchmarks that run without a GPU."""
    found = {path.stem for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text()}
    return {name for name in found if not name.startswith("gpu")}


def test_make_bench_runs_every_script_and_each_has_its_results() -> None:
    recipe = (ROOT / "Makefile").read_text().partition("\nbench:")[2].partition("\n\n")[0]
    (loop,) = re.findall(r"for each in (.*?);", recipe, re.DOTALL)
    assert set(loop.replace("\\", "").split()) == scripts()
    assert {path.stem for path in RESULTS} == scripts()


def test_the_readme_has_a_target_for_every_script() -> None:
    table = re.findall(r"^\| `(\w+)`", (BENCHMARKS / "README.md").read_text(), re.MULTILINE)
    assert set(table) == scripts()


@pytest.mark.parametrize("part", ["facts", "one_rank", "overlap"])
@pytest.mark.large
def test_parts_of_make_gpu_run_on_the_cpu(part: str, tmp_path) -> None:
    command = [sys.executable, BENCHMARKS / "gpu.py", "--emulated", "--only", part]
    done = subprocess.run([*command, "--out", tmp_path], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + (tmp_path / f"{part}.log").read_text()
    assert json.loads((tmp_path / f"{part}.jsonl").read_text().splitlines()[0])
    assert "no number here is a GPU's" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(
    ("body", "limit", "said"),
    [
        ("time.sleep(600)", 30, "was ended after"),
        ("raise KeyError('oh')", 500, "KeyError: 'oh'"),
        ("raise gpu_parts.NotThere('no such thing')", 500, "not run: no such thing"),
    ],
)
@pytest.mark.large
def test_a_part_that_does_not_end_well_leaves_its_rows(body, limit, said, tmp_path):
    """And the process that it started ends with it."""
    script = tmp_path / "gpu.py"  # as a copy, whose only part is bad
    code = (BENCHMARKS / "gpu.py").read_text()
    head, _, tail = code.partition("PARTS = (")
    bad = f"""def bad(place):
    child = subprocess.Popen(["sleep", "1000"])
    print(child.pid, flush=True)
    yield {{"a": 1}}
    {body}

PARTS = (Part("bad", {limit}, bad, "Bad"),)
"""
    script.write_text(head + bad + tail.partition("\n)\n")[2])
    out, path = tmp_path / "out", os.pathsep.join([str(ROOT), str(BENCHMARKS)])
    subprocess.run(
        [sys.executable, script, "--emulated", "--out", out],
        env=os.environ | {"PYTHONPATH": path},
        cwd=ROOT,
        check=said.startswith("not run"),
        capture_output=True,
    )
    report = (out / "report.md").read_text()
    assert said in report
    assert "| a |" in report or "| a | result |" in report
    started = (out / "bad.log").read_text().splitlines()[0]
    assert not alive(int(started))
