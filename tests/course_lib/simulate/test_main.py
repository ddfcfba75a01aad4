"""The command line: tables, and what bad input gets."""

from __future__ import annotations

import pytest

from course_lib.simulate.__main__ import main

TINY = ["--layers=4", "--width=512", "--heads=8", "--vocabulary=1000", "--sequence=256"]


def test_a_step_like_a_published_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["step", "--like", "Megatron 146B"]) == 0
    shown = capsys.readouterr().out
    assert "1536 ranks of selene" in shown and "MFU" in shown and "between nodes" in shown


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["step"], "give --layers --width --heads --vocabulary, or --like"),
        (["step", "--like", "nothing"], "no published run begins with 'nothing'"),
        (["step", *TINY, "--tensor=3"], "tensor=3 must divide"),
        (["search", *TINY, "--ranks=0", "--batch=1"], "no layout on 0 devices"),
    ],
    ids=lambda case: "-".join(case[-1:]) if isinstance(case, list) else "",
)
def test_bad_input_gets_one_line(command, message, capsys):
    assert main(command) == 2
    assert message in capsys.readouterr().err
