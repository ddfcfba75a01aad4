"""Killed ranks leave nothing in the machine's shared memory once all has ended."""

import multiprocessing
import os
import signal
import sys
import time
from multiprocessing import shared_memory
from pathlib import Path

import pytest
import torch.distributed as dist

from course_lib.ranks import RankError, Ranks
from course_lib.ranks.processes import fork_client

SHARED = Path("/dev/shm")


def make(folder: str) -> None:
    """Make what spawned workers would share, note its names, and be killed or not."""
    lock = multiprocessing.get_context("spawn").Lock()
    memory = shared_memory.SharedMemory(create=True, size=8)
    names = [f"sem.{lock._semlock.name[1:]}", memory.name]
    Path(folder, str(dist.get_rank())).write_text(" ".join(names))
    dist.barrier()
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is seen in /dev/shm")
@pytest.mark.parametrize("k", [pytest.param(1, marks=pytest.mark.large), 3])
def test_semaphores_of_killed_ranks_are_removed_in_the_end(own_server, k, tmp_path):
    with Ranks(k, on="cpu", timeout=60) as ranks, pytest.raises(RankError):
        ranks.run(make, str(tmp_path))
    left = {file.name: file.read_text().split() for file in tmp_path.iterdir()}
    assert len(left) == k
    files = [SHARED / name for names in left.values() for name in names]
    assert all((SHARED / name).exists() for name in left["0"])  # the others could clean up
    fork_client.shared_server().close()
    until = time.monotonic() + 30
    while any(file.exists() for file in files) and time.monotonic() < until:
        time.sleep(0.05)
    assert not [file for file in files if file.exists()]
