"""Ways in which a call can fail, beside those of `student_bugs`: found, explained, and survived."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib.ranks import RankError, Ranks, RanksError, RankTimeout
from course_lib.ranks.processes.fork_client import shared_server

# Fresh ranks would otherwise import this file, and pytest with it, after every failure.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

FOREVER = 1000.0
"""Seconds: whoever waited for a rank that sleeps so long would meet the time limit of the test."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Without a time limit: what is found is not found by one. How soon is in `benchmarks`."""
    with Ranks(3, on="cpu", timeout=None) as ranks:
        yield ranks


@pytest.fixture(autouse=True)
def next_call_works(ranks: Ranks) -> Iterator[None]:
    yield
    ranks.timeout = None
    assert ranks.run(sum_of_ranks) == [3.0, 3.0, 3.0]


def sum_of_ranks() -> float:
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return total.item()


def fails(ranks: Ranks, kind: type[RanksError], fn: Callable[[], object]) -> RanksError:
    """Run `fn`, which must fail as `kind`, and return the error."""
    with pytest.raises(RanksError) as caught:
        ranks.run(fn)
    assert type(caught.value) is kind, caught.value
    print(caught.value)
    return caught.value


# Exceptions and deaths -----------------------------------------------------------------------


def test_segmentation_fault(ranks: Ranks) -> None:
    def program() -> None:
        if dist.get_rank() == 2:
            ctypes.string_at(0)
        dist.barrier()

    error = fails(ranks, RankError, program)
    assert "Rank 2's process ended: signal SIGSEGV" in str(error)
    assert error.states[2].where.startswith("test_failures.py, line ")


def test_killed_from_outside(ranks: Ranks) -> None:
    pids = ranks.run(os.getpid)
    threading.Timer(0.3, os.kill, (pids[1], signal.SIGKILL)).start()

    def program() -> None:
        if dist.get_rank() == 1:
            time.sleep(FOREVER)
        dist.barrier()

    error = fails(ranks, RankError, program)
    assert "Rank 1's process ended: signal SIGKILL" in str(error)


def test_killed_between_two_calls(ranks: Ranks) -> None:
    pids = ranks.run(os.getpid)
    os.kill(pids[1], signal.SIGKILL)
    assert shared_server().exit_status(pids[1], wait=10) == -signal.SIGKILL
    after = ranks.run(os.getpid)
    assert not set(pids) & set(after)


# Time ----------------------------------------------------------------------------------------


def test_sleep_ends_at_the_limit_and_names_the_line(ranks: Ranks) -> None:
    def program() -> None:
        if dist.get_rank() == 0:
            time.sleep(FOREVER)
        dist.barrier()

    ranks.timeout = 1
    error = fails(ranks, RankTimeout, program)
    assert "longer than its limit of 1 s" in str(error)
    assert error.states[0].doing == "running"
    assert error.states[0].where.startswith("test_failures.py, line ")
    assert error.states[1].doing.startswith("waits in barrier")


# Amounts -------------------------------------------------------------------------------------


def test_a_million_lines(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
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
def test_a_result_of_two_gigabytes(ranks: Ranks) -> None:
    def program() -> torch.Tensor | None:
        if dist.get_rank() == 0:
            return torch.zeros(2**29).index_fill_(0, torch.tensor([2**29 - 1]), 7.0)
        return None

    result, *_ = ranks.run(program)
    assert result.shape == (2**29,)
    assert result[-1] == 7
