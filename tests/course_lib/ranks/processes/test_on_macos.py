"""What macOS lacks is replaced; it is imitated here."""

import builtins
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from course_lib.ranks import DeadlockError, Ranks
from course_lib.ranks.processes import fork_client, member
from tests.helpers import ROOT


def sum_in_group(skipping: int | None = None, local: bool = False) -> float:
    """Return a sum over ranks 0 and 1, which connect before rank 2 makes the group, too."""
    from course_lib.ranks.processes import gloo

    gloo.CONNECTS_LATER = False
    rank, tensor = dist.get_rank(), torch.ones(1)
    if rank == 2:
        dist.recv(tensor.clone(), 0)
    if rank != skipping and (rank < 2 or not local):
        pair = dist.new_group([0, 1], use_local_synchronization=local)
        if rank < 2:
            dist.all_reduce(tensor, group=pair)
    if rank == 0 and dist.get_world_size() > 2:
        dist.send(tensor, 2)
    return tensor.item()


@pytest.mark.parametrize("local", [False, True])
def test_a_skipped_new_group_is_found_where_groups_connect_at_once(local: bool) -> None:
    with Ranks(3, on="cpu", timeout=60) as ranks:
        assert ranks.run(sum_in_group, local=local) == [2.0, 2.0, 1.0]
        with pytest.raises(DeadlockError, match="new_group, which rank 1 never called") as caught:
            ranks.run(sum_in_group, 1, local)
        assert "waits in new_group of ranks 0, 1" in str(caught.value)
        assert ranks.run(sum_in_group, local=local) == [2.0, 2.0, 1.0]


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


def backward_without_rank_0() -> None:
    model = DistributedDataParallel(torch.nn.Linear(3, 3))
    if dist.get_rank() > 0:
        model(torch.ones(2, 3)).sum().backward()


@pytest.fixture
def without_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(member, "_PROC", tmp_path / "proc")


def test_a_hang_in_backward_is_explained_without_proc(without_proc) -> None:
    with Ranks(3, on="cpu", timeout=60) as ranks, pytest.raises(DeadlockError, match="all_reduce"):
        ranks.run(backward_without_rank_0)


def test_the_end_of_a_process_is_seen_without_proc(without_proc) -> None:
    child = subprocess.Popen(["sleep", "60"])
    assert member.cpu_state(child.pid, whole_process=True) is not None
    child.kill()
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert member.cpu_state(child.pid, whole_process=True) is None
    child.wait()
    assert member.cpu_state(child.pid, whole_process=True) is None


def abort(fds: list[int], config: object) -> None:
    os.abort()


def test_ranks_are_spawned_where_a_fork_cannot_compute(own_server, monkeypatch, capfd):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(fork_client, "TRIES_FORK", True)
    monkeypatch.setattr(fork_client, "TRIAL", f"{__name__}:abort")
    with Ranks(2, on="cpu", timeout=120) as ranks:
        assert ranks.run(sum_in_group) == [2.0, 2.0]
        server = fork_client.shared_server().process
        parents = ranks.run(lambda: (os.getppid(), sys.orig_argv[2]))
        assert parents == [(getattr(server, "pid", 0), "-c")] * 2  # a fork has -m
        with pytest.raises(DeadlockError):
            ranks.run(sum_on_rank_0)
        assert ranks.run(sum_in_group) == [2.0, 2.0]
    assert capfd.readouterr().err.count("A forked process cannot compute") == 1


def test_forks_that_can_compute_are_kept(own_server, monkeypatch, capfd):
    monkeypatch.setattr(fork_client, "TRIES_FORK", True)
    with Ranks(2, on="cpu", timeout=120) as ranks:
        assert ranks.run(lambda: sys.orig_argv[2]) == ["-m"] * 2
    assert "cannot compute" not in capfd.readouterr().err


KILLED = """
import glob, os, signal, tempfile
from course_lib.ranks import Ranks
from course_lib.ranks.processes import fork_client, team

fork_client.NEEDED, fork_client.LATER = fork_client.NEEDED[:4], ()
team.path_of = lambda fd: None
ranks = Ranks(2, on="cpu")
ranks.run(lambda: None)
assert glob.glob(tempfile.gettempdir() + "/ranks-*/store")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_store_does_not_outlive_a_killed_kernel(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", KILLED], env=environment, timeout=600)
    assert done.returncode == -9
    until = time.monotonic() + 60
    while (left := list(tmp_path.glob("ranks-*"))) and time.monotonic() < until:
        time.sleep(0.05)
    assert not left
