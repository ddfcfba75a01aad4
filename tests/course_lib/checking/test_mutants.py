"""The command that runs a file of right and wrong solutions on an assignment's checks."""

import subprocess
import sys

import pytest

from course_lib.checking import mutants

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


def test_every_solution_of_a_file_is_run_and_surprises_come_last(tmp_path, monkeypatch, capsys):
    file, label = tmp_path / "solutions.py", "speed_of_light__in_another_order: refused by 0 of"
    file.write_text(SOLUTIONS.replace("SAYS", "None"))
    command = [sys.executable, "-m", "course_lib.checking.mutants", "10_capstone"]
    done = subprocess.run([*command, file, "--seed", "7"], capture_output=True, text=True)
    lines = done.stdout.rstrip().splitlines()
    assert done.returncode == 0, done.stderr
    assert lines[0].startswith("right speed_of_light__right: refused by 0 of ")
    assert lines[1].startswith("wrong speed_of_light__no_operations: refused by ")
    assert lines[2].startswith(f"right {label}")
    assert lines[-1].startswith("0 surprises")

    def run(file, text: str) -> int:
        file.write_text(text)
        monkeypatch.setattr(sys, "argv", ["mutants", "10_capstone", str(file)])
        return mutants.main()

    assert run(tmp_path / "surprise.py", SOLUTIONS.replace("SAYS", "''")) == 1
    *_, count, surprise = capsys.readouterr().out.rstrip().splitlines()
    assert count.startswith("1 surprises") and surprise.startswith(f"wrong {label}")
    with pytest.raises(SystemExit):
        run(tmp_path / "none.py", "def speed_of_light(): ...")
    assert "no function that is marked with @passes or @fails" in capsys.readouterr().err
