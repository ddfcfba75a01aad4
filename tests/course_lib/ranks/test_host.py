"""The host of simulated ranks: what they do to their process does not reach the notebook."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from course_lib.ranks import RankError, Ranks, RanksError, RankTimeout, per_rank
from tests.helpers import ROOT


@pytest.fixture(scope="module")
def ranks():
    with Ranks(3, on="simulated", timeout=60) as ranks:
        yield ranks


def total(x: torch.Tensor) -> float:
    dist.all_reduce(x)
    return x.sum().item()


def works(ranks: Ranks) -> bool:
    return ranks.run(total, per_rank(torch.arange(9.0).chunk(3))) == [36.0] * 3


def ends(action) -> None:
    if dist.get_rank() == 1:
        action()
    dist.barrier()


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: os._exit(3), "it called exit with status 3"),
        (lambda: ctypes.string_at(0), r"segmentation fault in compiled code\)\.  \(test_host\.py"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed from outside, or out of memory"),
    ],
)
def test_a_rank_that_ends_its_process_costs_the_host_only(ranks, action, message):
    ranks.push(kept=1)
    with pytest.raises(RanksError, match="ended the process that all simulated.*" + message):
        ranks.run(ends, action)
    assert not ranks.trace.events
    assert works(ranks)
    with pytest.raises(RankError, match="no variable 'kept'"):
        ranks.pull("kept")


def test_an_endless_loop_meets_its_limit_even_if_it_never_lets_python_run() -> None:
    """One that does is among the `student_bugs`."""

    def loops() -> None:
        dist.barrier()
        if dist.get_rank() == 1:
            re.match(r"(a+)+$", "a" * 40 + "b")  # keeps the interpreter to itself for hours

    with Ranks(3, on="simulated", timeout=0.5) as ranks:
        with pytest.raises(RankTimeout, match=r"limit of 0\.5 s"):
            ranks.run(loops)
        ranks.timeout = 60  # a new host imports this file first, and a busy machine takes a while
        assert works(ranks)


def test_an_interrupt_ends_the_call_and_variables_stay(ranks, capsys):
    notebook = os.getpid()

    def loops() -> None:
        os.kill(notebook, signal.SIGINT)
        while True:
            pass

    assert works(ranks)
    ranks.push(kept=per_rank([1, 2, 3]))
    before, start = signal.signal(signal.SIGINT, signal.default_int_handler), time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            ranks.run(loops)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - start < 4
    output = capsys.readouterr().err
    assert "keep their variables" in output and "running" in output and "test_host.py" in output
    assert ranks.pull("kept") == [1, 2, 3] and works(ranks)


def test_all_ranks_of_a_notebook_share_the_host_and_it_forgets_those_that_are_gone() -> None:
    def kept() -> int:
        from course_lib.ranks import variables

        return len(variables._namespaces)

    pair, hundred = Ranks(2, on="simulated"), Ranks(100, on="simulated")
    assert {*pair.run(os.getpid), *hundred.run(os.getpid)} != {os.getpid()}
    assert pair.run(os.getpid)[0] == hundred.run(os.getpid)[0]
    pair.push(x=1), hundred.push(x=2)
    assert (pair.pull("x"), hundred.pull("x")) == ([1] * 2, [2] * 100)
    before = pair.run(kept)[0]
    del hundred
    assert pair.run(kept)[0] == before - 1
    pair.close()
    assert Ranks(2, on="simulated").run(kept)[0] == before - 2


THREADS = """
import threading
from unittest.mock import Mock
from course_lib.ranks import Ranks, host

host.Host = Mock(wraps=host.Host)
started = [threading.Thread(target=Ranks(2, on="simulated").start) for _ in range(4)]
for thread in started:
    thread.start()
for thread in started:
    thread.join()
print(host.Host.call_count)
"""
MANY_FILES = """
import os, resource
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4096), most))
files = [open(os.devnull) for _ in range(1100)]
from course_lib.ranks import Ranks

for on in ("cpu", "simulated"):
    with Ranks(2, on=on) as ranks:
        print(*ranks.run(lambda: 1))
print(os.dup(0) > 1024)
"""


@pytest.mark.parametrize(("script", "expected"), [(THREADS, "1"), (MANY_FILES, "1 1\n1 1\nTrue")])
def test_many_threads_and_many_open_files(script: str, expected: str) -> None:
    """Threads start one host together; descriptors above 1024 are as good as others."""
    completed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert completed.stdout.strip() == expected, completed.stderr


def test_a_rank_cannot_run_other_simulated_ranks(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="cannot start another such call"):
        ranks.run(lambda: Ranks(2, on="simulated").run(int))


@pytest.mark.large
def test_many_ranks_meet_their_limit_and_the_next_call_works(capfd):
    """The table had a row for each rank, and the ranks' ends were told one by one."""
    k = 512

    def ring() -> None:
        right, left = (dist.get_rank() + 1) % k, (dist.get_rank() - 1) % k
        while True:
            sent = dist.isend(torch.ones(1), right)
            dist.recv(torch.ones(1), left)
            sent.wait()

    with Ranks(k, on="simulated", timeout=0.5) as ranks:
        for _ in range(2):
            with pytest.raises(RankTimeout) as caught:
                ranks.run(ring)
            assert len(str(caught.value).splitlines()) < 80
    with Ranks(k, on="simulated", timeout=60) as ranks:
        assert ranks.run(dist.get_rank) == list(range(k))
    assert capfd.readouterr() == ("", "")
