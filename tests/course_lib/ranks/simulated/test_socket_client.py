"""Ranks that are processes, on the fabric behind a socket, do what those that are threads do."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from course_lib.ranks.costs.network import Network
from course_lib.ranks.explain.errors import (
    DeadlockError,
    MismatchError,
    RankTimeout,
)
from course_lib.ranks.ranks import Ranks
from course_lib.ranks.simulated.operation import Operation
from course_lib.ranks.simulated.socket_client import FabricStopped, fabric_rank
from course_lib.ranks.simulated.socket_frames import HEADER, post, read_post
from course_lib.ranks.simulated.socket_server import FabricServer
from tests.helpers import collectives_by_hand as by_hand
from tests.helpers.every_operation import assert_same, everything
from tests.helpers.mixed_program import mixed
from tests.helpers.socket_ranks import Serving, SocketRanks
from tests.helpers.student_bugs import BUGS, Bug
from tests.helpers.training import train_ddp

NETWORK = Network(1.3e-3, 7e6)


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[int, Ranks]]:
    pools = {k: Ranks(k, on="cpu", metered=False) for k in (1, 2, 3, 4)}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_every_operation(processes: dict[int, Ranks], k: int) -> None:
    ours = SocketRanks(processes[k]).run(everything, 5)
    theirs = Ranks(k, on="simulated").run(everything, 5)
    for rank in range(k):
        assert ours[rank].keys() == theirs[rank].keys()
        for name in ours[rank]:
            assert_same(ours[rank][name], theirs[rank][name], name)


def _on_tensor(fn: Callable[..., None], n: int, *args: Any) -> torch.Tensor:
    x = torch.arange(n, dtype=torch.float32) + dist.get_rank()
    fn(x, *args)
    return x


@pytest.mark.parametrize("k", [2, 3, 4])
def test_same_time_and_trace(processes: dict[int, Ranks], k: int) -> None:
    ours, theirs = SocketRanks(processes[k], NETWORK), Ranks(k, on="simulated", network=NETWORK)
    calls: list[tuple[Any, ...]] = [
        (by_hand.central, 100),
        (by_hand.tree, 101),
        (by_hand.ring, 103),
        (by_hand.halving_doubling, 107),
        (by_hand.pipelined_broadcast, 109, 4),
        (by_hand.blocking_broadcast, 109, 4),
    ]
    for call in calls:
        assert_same(ours.run(_on_tensor, *call), theirs.run(_on_tensor, *call), str(call))
        assert ours.trace.events == theirs.trace.events


def test_same_run_with_polling_computation_and_jitter(processes: dict[int, Ranks]) -> None:
    network = Network(1e-4, 1e6, jitter=0.5, seed=3)
    ours, theirs = SocketRanks(processes[4], network), Ranks(4, on="simulated", network=network)
    for a, b in zip(ours.run(mixed), theirs.run(mixed), strict=True):
        assert torch.equal(a[0], b[0])

    def communication(trace: Any) -> list[Any]:
        return [event[:-1] for event in trace.events if event.kind != "compute"]

    for _ in range(3):
        ours.run(mixed)
        assert communication(ours.trace) == communication(theirs.trace)


def test_ddp(processes: dict[int, Ranks]) -> None:
    ours = SocketRanks(processes[3]).run(train_ddp, True, False)
    theirs = Ranks(3, on="simulated").run(train_ddp, True, False)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


COMMUNICATE = [
    bug
    for bug in BUGS
    if bug.error in (DeadlockError, MismatchError)
    and not bug.differs
    and "DDP" not in bug.what
    and "new_group" not in bug.words  # calls of new_group do not cross the sockets
]


@pytest.mark.parametrize(
    "bug", COMMUNICATE, ids=[bug.what.replace(" ", "_") for bug in COMMUNICATE]
)
def test_found_and_explained(processes: dict[int, Ranks], bug: Bug) -> None:
    ranks = SocketRanks(processes[4])
    with pytest.raises(bug.error) as caught:  # at the time limit it would be a `RankTimeout`
        ranks.run(bug.fn)
    for word in bug.words:
        assert word.lower() in str(caught.value).lower()
    assert ranks.run(dist.get_rank) == [0, 1, 2, 3]


ANOTHER = """
import socket, sys
import torch, torch.distributed as dist
from course_lib.ranks.simulated.socket_client import fabric_rank

with fabric_rank(socket.socket(fileno=int(sys.argv[1])), 1, 2) as client:
    x = torch.tensor([10.0, 20.0])
    dist.all_reduce(x)
    got = torch.empty(3)
    dist.recv(got, src=0)
    client.sleep(2.0)
    dist.send(got.flip(0), dst=0)
    print(x.tolist(), client.now() >= 2.0)
"""


def test_ranks_may_be_any_processes() -> None:
    """One is this process, the other a program that nobody forked."""
    (near, own), (far, theirs) = socket.socketpair(), socket.socketpair()
    serving = Serving(FabricServer([near, far], NETWORK))
    with theirs:
        other = subprocess.Popen(
            [sys.executable, "-c", ANOTHER, str(theirs.fileno())],
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[theirs.fileno()],
        )
    try:
        with fabric_rank(own, 0, 2) as client:
            x = torch.tensor([1.0, 2.0])
            dist.all_reduce(x)
            dist.send(torch.tensor([3.0, 4.0, 5.0]), dst=1)
            back = torch.empty(3)
            handle = dist.irecv(back, src=1)
            early = handle.is_completed()
            handle.wait()
            with pytest.raises(ValueError, match="cannot send to itself"):
                client.post(Operation(0, "send", "", (0, 1), [x], [], peer=0))
            now = client.now()
        said, _ = other.communicate(timeout=300)
    finally:
        other.kill()
        other.wait()
    serving.join(30)
    assert serving.error is None and not early
    assert x.tolist() == [11.0, 22.0] and back.tolist() == [5.0, 4.0, 3.0]
    assert said == "[11.0, 22.0] True\n" and now > 2.0


def test_a_fabric_that_is_gone_stops_its_rank() -> None:
    (near, own), (far, silent) = socket.socketpair(), socket.socketpair()
    serving = Serving(FabricServer([near, far], NETWORK), timeout=0.2)
    with silent:
        with pytest.raises(FabricStopped, match="closed the connection"), fabric_rank(own, 0, 2):
            dist.recv(torch.empty(1), src=1)
        serving.join(30)
    assert isinstance(serving.error, RankTimeout)


def test_no_memory_of_the_server_reaches_a_rank() -> None:
    """The result of an operation is zeros until it is written, also after other use of memory."""
    dirty = [torch.full((n,), 7.0) for n in (3, 100, 10_000)]
    del dirty
    for n in (3, 100, 10_000):
        body = post(1, Operation(0, "recv", "g", (0, 1), [], [torch.empty(n)], peer=1), 0)
        read = read_post(bytearray(body[HEADER.size :]), 0, {0: ("g", (0, 1))}, 1 << 20)
        assert not read.operation.outputs[0].any()
    with pytest.raises(NotImplementedError, match="has no values"):
        post(1, Operation(0, "recv", "g", (0, 1), [], [torch.empty(3, device="meta")], peer=1), 0)
