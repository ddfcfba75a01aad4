"""Two nodes, each a job of its own on this machine, run one function."""

import json
import socket
from pathlib import Path

import pytest

from tests.helpers.watched_jobs import output_of, torchrun

SCRIPT = """
import torch, torch.distributed as dist

def main(name):
    rank, k = dist.get_rank(), dist.get_world_size()
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)
    assert x.item() == k * (k - 1) / 2, x
    y = torch.empty(1)
    request = dist.isend(x + rank, (rank + 1) % k)
    dist.recv(y, (rank - 1) % k)
    request.wait()
    assert y.item() == x.item() + (rank - 1) % k
    print(f"{name} {rank} {k}\\n", end="")  # in one piece: two ranks write into one pipe
"""


@pytest.mark.large
def test_two_nodes_of_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    jobs = []
    for node in range(2):
        options = ["--nnodes", "2", "--node-rank", str(node), "--master-addr", "127.0.0.1"]
        options += ["--master-port", str(port), "-m", "course_lib.ranks.multinode"]
        options += ["train.py:main", "--trace", "trace.json", "--timeout", "60", "hello"]
        jobs.append(torchrun(tmp_path, *options, ranks=2, GLOO_SOCKET_IFNAME="lo"))
    printed = output_of(*jobs)
    assert [job.returncode for job in jobs] == [0, 0], printed
    assert all(f"hello {rank} 4" in printed for rank in range(4))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in complete} == {0, 1, 2, 3}
    reductions = [event for event in complete if event["name"] == "all_reduce"]
    assert len(reductions) == 4
    # On one clock: no rank can be done before the last one has begun, but for the clocks' error.
    first_end = min(event["ts"] + event["dur"] for event in reductions)
    assert first_end > max(event["ts"] for event in reductions) - 50_000
