"""Two nodes, each with its own network namespace where that can be had, run one function."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.helpers import ROOT

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


@contextmanager
def two_namespaces() -> Iterator[list[tuple[list[str], str, str]]]:
    """Yield, per node, a command prefix, the first node's address and the network card.

    Two network namespaces joined by a virtual cable; where they cannot be made, the loopback.
    """
    names = [f"ranks{os.getpid()}{end}" for end in "ab"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        if shutil.which("ip") is None:
            raise FileNotFoundError("ip")
        for name in names:
            ip("netns", "add", name)
        cards = [f"v{os.getpid()}{end}" for end in "ab"]
        ip("link", "add", cards[0], "type", "veth", "peer", "name", cards[1])
        for number, (name, card) in enumerate(zip(names, cards, strict=True), 1):
            ip("link", "set", card, "netns", name)
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", card)
            ip("-n", name, "link", "set", card, "up")
            ip("-n", name, "link", "set", "lo", "up")
    except (subprocess.CalledProcessError, OSError):
        nodes = [([], "127.0.0.1", "lo")] * 2
    else:
        nodes = [
            (["ip", "netns", "exec", name], "10.77.0.1", card)
            for name, card in zip(names, cards, strict=True)
        ]
    try:
        yield nodes
    finally:
        if shutil.which("ip") is not None:
            for name in names:
                subprocess.run(["ip", "netns", "del", name], capture_output=True)


def test_two_nodes_of_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with two_namespaces() as nodes:
        processes = []
        for rank, (prefix, address, card) in enumerate(nodes):
            command = [*prefix, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
            command += ["--node-rank", str(rank), "--nproc-per-node", "2"]
            command += ["--master-addr", address, "--master-port", str(port)]
            command += ["-m", "course_lib.ranks.multinode", "train.py:main"]
            command += ["--trace", "trace.json", "--timeout", "60", "hello"]
            environment = {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": card}
            environment["TMPDIR"] = str(tmp_path)  # torchrun never removes its folder for logs
            processes.append(
                subprocess.Popen(
                    command,
                    cwd=tmp_path,
                    env={**os.environ, **environment},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        try:
            results = [process.communicate(timeout=300) for process in processes]
        finally:
            for process in processes:
                process.kill()
    for process, (_, errors) in zip(processes, results, strict=True):
        assert process.returncode == 0, errors
    printed = "".join(out for out, _ in results)
    assert all(f"hello {rank} 4" in printed for rank in range(4))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in complete} == {0, 1, 2, 3}
    reductions = [event for event in complete if event["name"] == "all_reduce"]
    assert len(reductions) == 4
    # On one clock: no rank can be done before the last one has begun, but for the clocks' error.
    first_end = min(event["ts"] + event["dur"] for event in reductions)
    assert first_end > max(event["ts"] for event in reductions) - 50_000
