"""If somebody ends a process from outside, no student loses a point for it.

Each process of a sandbox is killed, or stopped for a while, at each moment of an examination. The
result is the same verdict as without that, or `MachineFailure` and no verdict.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from autograder.course import Settings
from autograder.examination import budget as budget_module
from autograder.examination.submission import Submission
from autograder.sandbox.sandbox import MachineFailure, Sandbox
from course_lib.checking import run_check
from tests.autograder.examination.test_handed_in import total
from tests.helpers.sandbox_processes import processes

HELPER = "import torch.distributed as dist\nimport time"
RIGHT = """
def total(mine):
    time.sleep(0.3)  # before and after it sends: a while in which its rank can be killed
    dist.all_reduce(mine)
    time.sleep(0.3)
    return mine
"""


@pytest.fixture(scope="module")
def place() -> Iterator[Sandbox]:
    """Its sandbox is ended again and again: no other test shares it."""
    with Sandbox() as place:
        yield place


def examine(place, moment="", act=lambda: None, case=20):
    """Examine a submission of two cells and two cases; at one moment call something else."""

    def happens(now: str) -> None:
        if now == moment:
            act()

    place.warm()
    with Submission(place, Settings(cell_seconds=20, case_seconds=case)) as submission:
        happens("before the first cell")
        submission.run_cell(HELPER)
        happens("in a cell")
        submission.run_cell("time.sleep(0.5)\n" + RIGHT)
        run, count = submission.runner(), itertools.count(1)

        def runs(*arguments: Any) -> Any:
            happens(f"in case {next(count)}")
            return run(*arguments)

        report = run_check("t/total", total("total", 20, 1, 2), runs, seed="s")
        submission.check_alive()
    return report


def sends(place: Sandbox, part: str, number: int) -> None:
    """Send a signal to the newest process that plays this part, if there is one."""
    with contextlib.suppress(IndexError, ProcessLookupError):
        os.kill(processes(place._process.pid)[part][-1], number)


MOMENTS = {"before the first cell": 0.0, "in a cell": 0.2, "in case 1": 0.25, "in case 2": 0.5}


KILLS = [(part, moment) for part in ("bubblewrap", "init", "server", "cells") for moment in MOMENTS]


@pytest.mark.parametrize(
    ("part", "moment"),
    [*(pytest.param(*case, marks=pytest.mark.large) for case in KILLS[:-1]), KILLS[-1]],
)
def test_a_process_that_is_killed_costs_nobody_points(place, part, moment):
    kill = threading.Timer(MOMENTS[moment], sends, (place, part, signal.SIGKILL))
    try:
        report = examine(place, moment, kill.start)
    except MachineFailure:
        report = examine(place)  # tried again, in a new sandbox
    assert report.passed, report


@pytest.mark.large
@pytest.mark.parametrize("part", ["server", "cells"])
def test_a_sandbox_that_is_stopped_for_longer_than_the_limits_costs_nobody_points(place, part):
    def stop() -> None:
        sends(place, part, signal.SIGSTOP)
        threading.Timer(4, sends, (place, part, signal.SIGCONT)).start()

    try:
        report = examine(place, "in case 2", threading.Timer(0.2, stop).start, case=2.0)
    except MachineFailure:
        report = examine(place)
    assert report.passed, report


def test_a_process_that_stays_stopped_is_given_up_and_costs_nobody_points(place, monkeypatch):
    monkeypatch.setattr(budget_module, "STANDSTILL", 2.0)

    def stop() -> None:
        sandbox = place._process.pid
        before = {*processes(sandbox)["cells"]}

        def stop_a_rank() -> None:
            # On a busy machine it starts late; what is stopped earlier may be a rank of case 1.
            while not (new := {*processes(sandbox)["cells"]} - before):
                time.sleep(0.01)
            time.sleep(0.2)
            os.kill(max(new), signal.SIGSTOP)

        threading.Thread(target=stop_a_rank, daemon=True).start()

    with pytest.raises(MachineFailure, match=r"was paused|did not start"):
        examine(place, "in case 2", stop, case=1.0)
    assert examine(place).passed
