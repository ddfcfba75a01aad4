"""The command line: tables, a figure, and what bad input gets."""

from __future__ import annotations

import subprocess
import sys

import pytest

from course_lib.simulate.__main__ import main
from tests.helpers import ROOT

TINY = ["--layers=4", "--width=512", "--heads=8", "--vocabulary=1000", "--sequence=256"]


def test_a_step_like_a_published_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["step", "--like", "Megatron 146B"]) == 0
    shown = capsys.readouterr().out
    assert "1536 ranks of selene" in shown and "MFU" in shown and "between nodes" in shown


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["step"], "give --layers --width --heads --vocabulary, or --like"),
        (["step", "--like", "nothing"], "no published run begins with 'nothing'"),
        (["step", *TINY, "--tensor=3"], "tensor=3 must divide"),
        (["failures", "--devices", "0"], "replica must be 1 to 0 devices"),
        (["search", *TINY, "--ranks=0", "--batch=1"], "--ranks must be at least 1"),
    ],
    ids=lambda case: "-".join(case[-1:]) if isinstance(case, list) else "",
)
def test_bad_input_gets_one_line(
    command: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ["step", "--like", "MegaScale 175B, 12288"],
        ["search", "--like", "MPT 30b, 8 H100", "--ranks", "16", "--batch", "32"],
        ["published"],
        ["failures"],
    ],
    ids=lambda command: command[0],
)
def test_formulas_do_not_wait_for_pytorch(command: list[str]) -> None:
    """It takes a second to import, and what 100,000 ranks take is known in some milliseconds."""
    program = (
        "import sys; from course_lib.simulate.__main__ import main; "
        f"status = main({command!r}); sys.exit(status or 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, cwd=ROOT, timeout=300
    )
    assert done.returncode == 0, done.stderr.decode()
