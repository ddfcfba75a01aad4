"""Thousands of calls on the same ranks: what one call leaves behind, all of them add up."""

import os
import sys

import pytest
import torch
import torch.distributed as dist

from course_lib.ranks import Ranks
from tests.course_lib.ranks.test_large_arguments import memory

CALLS = 5_000
WARM_UP = 500
# Bytes per rank, over all the calls. PyTorch keeps 150 bytes of every thread that has had a
# process group (its table of groups by name). That is most of what simulated ranks leave.
ALLOWED = 1 << 20


def step(number: int) -> float:
    """Send to the next rank, and add up what came."""
    rank, size = dist.get_rank(), dist.get_world_size()
    outgoing, incoming = torch.full((50,), float(rank + number)), torch.empty(50)
    sending = dist.isend(outgoing, (rank + 1) % size)
    dist.recv(incoming, (rank - 1) % size)
    sending.wait()
    dist.all_reduce(incoming)
    return float(incoming[0])


@pytest.mark.large
@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("on", ["cpu", "simulated"])
def test_thousands_of_calls_leave_nothing_behind(on: str) -> None:
    """Threads of this process share what they leave: as much is allowed for each."""
    with Ranks(2, on=on) as ranks:
        for number in range(WARM_UP):
            ranks.run(step, number)
        watched = ranks.processes() or [os.getpid()]
        allowed = ALLOWED * 2 // len(watched)
        before = [memory("RssAnon", pid) for pid in watched]
        for number in range(CALLS):
            assert ranks.run(step, number) == [2.0 * number + 1.0] * 2
        grown = [memory("RssAnon", pid) - was for pid, was in zip(watched, before, strict=True)]
    assert max(grown) <= allowed
