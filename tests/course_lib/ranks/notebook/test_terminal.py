"""The ranks where there is no Jupyter: IPython in a terminal, and a client that shows only text."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

from tests.helpers.kernels import descendants, wait_until_gone

PROMPT, MORE = r"In \[\d+\]: ", r"\.\.\.: "


class Terminal:
    """IPython as a person has it in a terminal."""

    def __init__(self, home: Path) -> None:
        quiet = ["--simple-prompt", "--no-banner", "--colors=nocolor"]
        self.process = pexpect.spawn(
            sys.executable,
            ["-m", "IPython", *quiet],
            env={**os.environ, "IPYTHONDIR": str(home), "NO_COLOR": "1", "TERM": "dumb"},
            encoding="utf-8",
            timeout=300,
            echo=False,
            dimensions=(50, 300),
        )
        self.process.expect(PROMPT)

    def run(self, cell: str) -> str:
        """Type a cell; return what stands between it and the next prompt."""
        first, *rest = cell.splitlines()
        self.process.sendline(first)
        for line in rest:
            self.process.expect(MORE)
            self.process.sendline(line)
        if first.startswith("%%"):  # an empty line is part of a cell, two end it
            for _ in range(2):
                self.process.expect(MORE)
                self.process.sendline("")
        self.process.expect(PROMPT)
        return str(self.process.before)


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    made = Terminal(tmp_path_factory.mktemp("ipython"))
    made.run("%load_ext course_lib")
    made.run("import time, torch, torch.distributed as dist")
    made.run("%ranks 2 --on cpu")
    yield made
    below = descendants(made.process.pid)
    made.process.sendline("exit")
    made.process.expect(pexpect.EOF)
    made.process.close()
    assert made.process.exitstatus == 0
    assert wait_until_gone(below) == []


def test_a_cell_runs_on_every_rank(terminal: Terminal) -> None:
    said = terminal.run("%%ranks\nprint('x', rank)\nrank + 1")
    for line in ("[rank 0] x 0", "[rank 1] x 1", "[rank 0] 1", "[rank 1] 2"):
        assert line in said
    failed = terminal.run("%%ranks\n1 / 0 if rank else 3")
    assert "Rank 1 raised ZeroDivisionError: division by zero  (Cell In[" in failed
    assert "Traceback (most recent call last)" not in failed


def test_what_a_notebook_draws_is_told_in_words(terminal: Terminal) -> None:
    terminal.run("ranks.run(lambda: dist.all_reduce(torch.ones(3)))")
    words = r"Timeline of 2 ranks over .*: on all ranks together 2 all_reduce"
    for cell in ("ranks.trace.plot()", "ranks.trace.plot();"):
        assert re.search(words, terminal.run(cell)), cell
    terminal.run("import matplotlib.pyplot as plt; from course_lib.figures import explore")
    drawn = terminal.run(
        "explore(lambda K: plt.figure(), lambda K: f'{K} ranks.', alt='A figure.', K=[1])"
    )
    assert "A figure." in drawn and "<" not in drawn


def test_ctrl_c_ends_the_call_and_the_prompt_is_back(terminal: Terminal) -> None:
    terminal.process.sendline("ranks.run(lambda: print('asleep') or time.sleep(1000))")
    terminal.process.expect(r"\[ranks? 0.*\] asleep")
    terminal.process.sendintr()
    terminal.process.expect(PROMPT)
    said = str(terminal.process.before)
    assert "Interrupted." in said and "KeyboardInterrupt" in said
    assert "[0, 1]" in terminal.run("ranks.run(lambda: dist.get_rank())")
