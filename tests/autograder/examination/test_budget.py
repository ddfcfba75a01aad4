"""Wall-clock time counts, except while a submission waits for a core; a tenth always counts."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autograder.course import Settings
from autograder.examination.budget import PATIENCE, STANDSTILL, Budget, Deadline
from autograder.examination.submission import Submission
from autograder.sandbox.cores import Cores
from autograder.sandbox.sandbox import MachineFailure, Sandbox


@dataclass
class Machine:
    """A machine whose clock and queue the test moves."""

    now: float = 100.0
    busy: float = 3.0
    cores: dict[int, Cores] = field(default_factory=lambda: {1: Cores(7.0, 9.0)})

    def passes(self, seconds: float, pid: int = 1, *, ran: float = 0, waited: float = 0) -> None:
        before = self.cores.get(pid, Cores(0, 0))
        self.now += seconds
        self.busy += seconds  # the grader carries messages all the time
        self.cores = {**self.cores, pid: Cores(before.ran + ran, before.waited + waited)}


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def budget(machine: Machine) -> Budget:
    limits = Settings(submission_seconds=60)
    return Budget(limits, lambda: machine.cores, lambda: machine.now, lambda: machine.busy)


def test_computing_sleeping_and_being_stuck_count_and_waiting_for_a_core_does_not(machine, budget):
    with budget:
        machine.passes(10, ran=2, waited=8)
        machine.passes(3)
        assert budget.left == 60 - 5
    assert (budget.used, budget.waited) == (5, 8)


def test_filling_the_queue_oneself_gains_nothing(machine: Machine, budget: Budget) -> None:
    """A hundred processes share two cores: each waits, but they use both cores all the time."""
    with budget:
        for pid in range(99):
            machine.passes(0, pid=100 + pid, ran=0.2, waited=9.8)
        machine.passes(10, pid=999, ran=0.2, waited=9.8)
    assert (budget.used, budget.waited) == (10, 0)


def test_a_deadline_moves_away_while_its_work_is_kept_waiting(machine, budget):
    with budget:
        deadline = Deadline(budget, 2)
        machine.passes(10, ran=1, waited=9)
        assert deadline.left == pytest.approx(1)
        deadline.shorten(5)
        assert deadline.left == pytest.approx(1)
        deadline.shorten(0.5)
        machine.passes(0.5)
        assert deadline.left == pytest.approx(0)
        assert deadline.seconds == 2


def test_the_verdict_says_when_time_is_over_and_for_what_it_waited(machine, budget):
    with budget:
        machine.passes(59)
        assert budget.told_when_over() is None
        machine.passes(1)
        over = "the submission used up its time limit of 60 s, and waited another {} s for a core"
        assert budget.told_when_over() == over.format(0)
        machine.passes(120, waited=108)
        assert budget.told_when_over() == over.format(108)


@pytest.mark.parametrize("stopped", [True, False])
def test_time_in_which_the_machine_stood_still_does_not_count(machine, budget, stopped):
    """Either a process of the submission is stopped from outside, or the grader is not run."""
    with budget:
        machine.passes(2)
        assert budget.used == 0 and budget.left == 58
        machine.now += 50
        machine.cores = {**machine.cores, 5: Cores(0, 0, stopped)}
        assert (budget.left, budget.used, budget.still) == (58, 2, 50)
        machine.cores = {**machine.cores, 5: Cores(0, 0)}
        machine.passes(1)
        assert budget.left == 57
        machine.now += STANDSTILL - 40
        machine.cores = {**machine.cores, 5: Cores(0, 0, stopped)}
        with pytest.raises(MachineFailure, match="was paused for 70 s"):
            _ = budget.left
        machine.cores = {}
    with pytest.raises(MachineFailure, match="paused"), budget:  # told at the end, too
        machine.now += 10


seconds = st.floats(0, 100)


@given(st.lists(st.tuples(seconds, seconds, seconds), min_size=1))
def test_what_counts_is_never_more_than_the_wall_nor_less_than_a_tenth_of_it(steps):
    machine = Machine()
    budget = Budget(Settings(), lambda: machine.cores, lambda: machine.now, lambda: machine.busy)
    with budget:
        for passed, ran, waited in steps:
            machine.passes(passed, ran=ran, waited=waited)
            _ = budget.left
    wall = machine.now - 100
    assert budget.still == 0
    assert wall / PATIENCE - 1e-6 <= budget.used <= wall + 1e-6
    assert budget.used + budget.waited == pytest.approx(wall)


# The kernel's numbers -------------------------------------------------------------------------


@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="this kernel does not count waiting"
)
def test_the_same_work_counts_as_much_on_a_crowded_core(place: Sandbox) -> None:
    work = (
        "import os, time\n{}\nbegin, wall = time.process_time(), time.monotonic()\n"
        "while time.process_time() - begin < 0.3: pass\nprint(time.monotonic() - wall)"
    )
    pinned = f"os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})"
    busy = [sys.executable, "-c", f"import os\n{pinned}\nwhile True: pass"]
    with Submission(place) as submission, ExitStack() as others:
        submission.run_cell("pass")  # the notebook's process has started
        for _ in range(3):
            others.callback(others.enter_context(subprocess.Popen(busy)).kill)
        outcome = submission.run_cell(work.format(pinned))
        assert not outcome.error
        wall, used, waited = float(outcome.stdout), submission.budget.used, submission.budget.waited
    assert used + waited >= wall > 0.3
    assert used < 0.75 * wall, (wall, used, waited)
