"""Ends of processes, and amounts, beside the failures of `student_bugs`: explained, survived."""

import ctypes
import os
import signal
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib.ranks import RankError, RanksError
from course_lib.ranks.processes.fork_client import shared_server
from tests.course_lib.ranks.processes.test_world import world_sum
from tests.course_lib.ranks.test_every_carrier import a_ddp_step_against_a_receive

# Fresh ranks would otherwise import this file, and pytest with it, after every failure.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(autouse=True)
def next_call_works(ranks):
    yield
    assert ranks.run(world_sum) == [3.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("end", "name"),
    [
        (lambda: ctypes.string_at(0), "SIGSEGV"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL"),
    ],
)
def test_a_process_that_ends_in_a_call(ranks, end, name: str) -> None:
    def program() -> None:
        if dist.get_rank() == 2:
            end()
        dist.barrier()

    with pytest.raises(RankError, match=f"Rank 2's process ended: signal {name}") as caught:
        ranks.run(program)
    assert name == "SIGKILL" or caught.value.states[2].where.startswith("test_failures.py, line ")


def crash() -> None:
    ctypes.string_at(0)


def test_a_crash_is_told_by_its_own_line_and_not_that_of_an_earlier_hang(ranks) -> None:
    with pytest.raises(RanksError, match="wait for one another"):
        ranks.run(a_ddp_step_against_a_receive)
    with pytest.raises(RankError) as caught:
        ranks.run(crash)
    line = crash.__code__.co_firstlineno + 1
    first = caught.value.states[caught.value.rank]
    assert first.where.startswith(f"test_failures.py, line {line}")


def test_killed_between_two_calls(ranks) -> None:
    pids = ranks.run(os.getpid)
    os.kill(pids[1], signal.SIGKILL)
    assert shared_server().exit_status(pids[1], wait=10) == -signal.SIGKILL
    after = ranks.run(os.getpid)
    assert not set(pids) & set(after)


# Amounts -------------------------------------------------------------------------------------


def test_a_million_lines(ranks, capsys: pytest.CaptureFixture[str]) -> None:
    def program() -> None:
        if dist.get_rank() == 1:
            for number in range(1_000_000):
                print(number)

    ranks.run(program)
    lines = capsys.readouterr().out.splitlines()
    assert "[rank 1] 0" in lines
    assert "[rank 1] 999999" in lines
    assert any("more lines left out" in line for line in lines)
    assert len(lines) < 3000


@pytest.mark.large
def test_a_result_of_two_gigabytes(ranks) -> None:
    def program() -> torch.Tensor | None:
        if dist.get_rank() == 0:
            return torch.zeros(2**29).index_fill_(0, torch.tensor([2**29 - 1]), 7.0)
        return None

    result, *_ = ranks.run(program)
    assert result.shape == (2**29,)
    assert result[-1] == 7
