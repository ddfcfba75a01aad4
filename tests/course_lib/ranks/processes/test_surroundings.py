"""The ranks start wherever a notebook does: sandboxes, odd paths, no network, two at once."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autograder.errors import SandboxUnavailable
from autograder.sandbox.bubblewrap import probe
from course_lib.ranks import Ranks
from course_lib.ranks.processes import fork_client
from course_lib.ranks.processes.fork_client import ForkServer
from tests.helpers import ROOT
from tests.helpers.kernels import descendants, kernel, wait_until_gone

PROGRAM = """
import os, socket, torch, torch.distributed as dist
from course_lib.ranks import DeadlockError, Ranks

def total():
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x)
    return x.item()

with Ranks(3, on="cpu") as ranks:
    assert ranks.run(total) == [3.0] * 3
    try:
        ranks.run(lambda: dist.barrier() if dist.get_rank() else None)
    except DeadlockError:
        pass
    assert ranks.run(total) == [3.0] * 3
print("right", os.getuid(), socket.gethostname())
"""


@pytest.fixture
def bwrap() -> str:
    """Return the path of the bubblewrap that the autograder would use."""
    try:
        return probe().path
    except SandboxUnavailable as error:
        pytest.skip(error.reason)


@pytest.mark.large
def test_in_a_sandbox_without_network_name_or_rights(tmp_path: Path, bwrap: str) -> None:
    place = "/tmp/a path with spaces"
    command = [bwrap, "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
    command += ["--tmpfs", "/tmp", "--ro-bind", str(ROOT), f"{place}/the course"]
    if Path(sys.prefix).is_relative_to("/tmp"):  # as it is when the checkout lies there
        command += ["--ro-bind", sys.prefix, sys.prefix]
    command += ["--bind", str(tmp_path), f"{place}/home", "--chdir", f"{place}/home"]
    command += ["--unshare-user", "--uid", "1234", "--unshare-pid", "--unshare-net"]
    command += ["--unshare-uts", "--hostname", "nowhere.invalid", "--die-with-parent"]
    command += [
        "--setenv",
        "PYTHONPATH",
        f"{place}/the course",
        "--setenv",
        "HOME",
        f"{place}/home",
    ]
    probe = subprocess.run([*command, "true"], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"bubblewrap cannot make namespaces here: {probe.stderr.strip()}")
    done = subprocess.run(
        [*command, sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "right 1234 nowhere.invalid\n", done.stderr


def test_a_notebook_starts_the_fork_server_when_it_imports_the_ranks() -> None:
    with kernel() as fresh:
        fresh.run("import course_lib.ranks")
        server = descendants(fresh.pid)[0]
        fresh.run("from course_lib.ranks import Ranks\nranks = Ranks(2)\nranks.run(lambda: 1)")
        below = descendants(fresh.pid)
        assert below[0] == server
        assert len(descendants(server)) == 3  # the ranks, and what cleans up after them
        assert len(below) == 4
    assert wait_until_gone(below) == []


def test_gpus_that_the_notebook_chooses_late_are_those_of_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which a rank must know when it opens CUDA, before its first call."""
    fork_client.shared_server().wait_until_ready()
    configs = []
    fork = ForkServer.fork

    def note(server: ForkServer, function: str, config: dict[str, Any], *more: Any) -> int:
        configs.append(config)
        return fork(server, function, config, *more)

    monkeypatch.setattr(ForkServer, "fork", note)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    with Ranks(2, on="cpu") as ranks:
        ranks.start()
    told = [config["environment"]["CUDA_VISIBLE_DEVICES"] for config in configs]
    assert told == ["1,3", "1,3"]
