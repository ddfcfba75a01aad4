"""What macOS lacks is replaced; it is imitated here."""

import builtins
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from course_lib.ranks import DeadlockError, Ranks

REAP = """
import os, select, signal, time
from course_lib.ranks.processes import fork_server

if hasattr(os, "waitid"):
    del os.waitid
assert fork_server._reap() == []  # no child
read, write = os.pipe()
children = {}
for number in (0, 3):
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        if os.fork() == 0:  # left behind, and holds the pipe
            time.sleep(600)
        os._exit(number)
    children[child] = number
running = os.fork()
if running == 0:
    os.close(write)
    time.sleep(600)
os.close(write)
ended, until = {}, time.monotonic() + 60
while len(ended) < 2 and time.monotonic() < until:
    ended.update(fork_server._reap())
    time.sleep(0.01)
assert ended == children, ended
assert select.select([read], [], [], 60)[0], "what a child has started still runs"
os.kill(running, signal.SIGKILL)
while not ended.get(running) and time.monotonic() < until:
    ended.update(fork_server._reap())
assert ended[running] == -signal.SIGKILL
"""


def test_children_are_reaped_without_waitid() -> None:
    """In a process of its own, because it reaps all children."""
    subprocess.run([sys.executable, "-c", REAP], check=True, timeout=120)


def sum_in_group(skipping: int | None = None) -> float:
    from course_lib.ranks.processes import gloo

    gloo.CONNECTS_LATER = False
    tensor = torch.ones(1)
    if dist.get_rank() != skipping:
        dist.all_reduce(tensor, group=dist.new_group([0, 1]))
    return tensor.item()


def test_a_skipped_new_group_is_found_where_groups_connect_at_once() -> None:
    with Ranks(2, on="cpu", timeout=60) as ranks:
        assert ranks.run(sum_in_group) == [2.0, 2.0]
        with pytest.raises(DeadlockError, match="new_group, which rank 1 never called") as caught:
            ranks.run(sum_in_group, 1)
        assert "waits in new_group #1 of ranks 0, 1" in str(caught.value)
        assert ranks.run(sum_in_group) == [2.0, 2.0]


def sums_in_kept_groups() -> list[float]:
    from course_lib.ranks.processes import gloo

    gloo.CONNECTS_LATER = False
    if not hasattr(builtins, "kept"):
        pairs = [[0, 1], [1, 2], [0, 2], [0, 1, 2], [0, 1], [1, 2]]
        builtins.kept = [dist.new_group(pair) for pair in pairs]
    sums = []
    for group in builtins.kept:
        if dist.get_rank(group) >= 0:
            sums.append(torch.ones(1))
            dist.all_reduce(sums[-1], group=group)
    return [tensor.item() for tensor in sums]


def sum_on_rank_0() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))


def test_groups_that_connect_at_once_do_so_in_one_order_after_a_failure() -> None:
    with Ranks(3, on="cpu", timeout=30) as ranks:
        before = ranks.run(sums_in_kept_groups)
        for _ in range(2):
            with pytest.raises(DeadlockError):
                ranks.run(sum_on_rank_0)
            assert ranks.run(sums_in_kept_groups) == before
