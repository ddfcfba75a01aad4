"""The command that runs a file of right and wrong solutions on an assignment's checks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SOLUTIONS = """
from course_lib.checking.mutants import Mutant, edits_of, fails, passes

@passes
def speed_of_light__right(flops, sent, received, rate, bandwidth):
    return max(max(flops) / rate, max(sent) / bandwidth, max(received) / bandwidth)

edited = edits_of(
    speed_of_light__right,
    Mutant("no_operations", "", "max(flops) / rate, ", ""),
    Mutant("in_another_order", SAYS, "max(flops) / rate, ", "max(flops) / rate, 0, "),
)
"""


def run(file: Path, text: str) -> tuple[int, list[str]]:
    file.write_text(text)
    command = [sys.executable, "-m", "course_lib.checking.mutants", "10_capstone", str(file)]
    process = subprocess.run([*command, "--seed", "7"], capture_output=True, text=True)
    return process.returncode, (process.stdout + process.stderr).rstrip().splitlines()


def test_every_solution_of_a_file_is_run_and_surprises_come_last(tmp_path: Path) -> None:
    file, label = tmp_path / "solutions.py", "speed_of_light__in_another_order: refused by 0 of"
    status, lines = run(file, SOLUTIONS.replace("SAYS", "None"))
    assert status == 0, lines
    assert lines[0].startswith("right speed_of_light__right: refused by 0 of ")
    assert lines[1].startswith("wrong speed_of_light__no_operations: refused by ")
    assert lines[2].startswith(f"right {label}")
    assert lines[-1].startswith("0 surprises")
    status, lines = run(file, SOLUTIONS.replace("SAYS", "''"))
    assert status == 1
    assert lines[-2].startswith("1 surprises")
    assert lines[-1].startswith(f"wrong {label}")


def test_a_file_without_solutions_is_an_error(tmp_path: Path) -> None:
    status, lines = run(tmp_path / "solutions.py", "def speed_of_light(): ...")
    assert status == 2
    assert "has no function that is marked with @passes or @fails" in lines[-1]
