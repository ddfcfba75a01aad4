"""Ranks that are processes, on the grader's network, do what those that are threads do."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autograder.inside.fabric_client import FabricStopped
from course_lib import collectives
from course_lib.ranks.costs.network import Network
from course_lib.ranks.explain.errors import RankTimeout
from course_lib.ranks.ranks import Ranks
from course_lib.ranks.simulated.operation import Operation
from tests.helpers.carried_ranks import CarriedRanks, Carrying, rank_on

NETWORK = Network(1.3e-3, 7e6)


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[int, Ranks]]:
    pools = {k: Ranks(k, on="cpu", metered=False) for k in (1, 2, 3, 4)}
    yield pools
    for pool in pools.values():
        pool.close()


def _on_tensor(fn: Callable[..., None], n: int, *args: Any) -> torch.Tensor:
    x = torch.arange(n, dtype=torch.float32) + dist.get_rank()
    fn(x, *args)
    return x


@pytest.mark.parametrize("k", [2, 3, 4])
def test_same_time_and_trace(processes: dict[int, Ranks], k: int) -> None:
    network = Network(1.3e-3, 7e6)
    carried, simulated = (
        CarriedRanks(processes[k], network),
        Ranks(k, on="simulated", network=network),
    )
    calls: list[tuple[Any, ...]] = [
        (collectives.central_all_reduce, 100),
        (collectives.tree_all_reduce, 101),
        (collectives.ring_all_reduce, 103),
        (collectives.halving_doubling_all_reduce, 107),
        (collectives.pipelined_broadcast, 109),
    ]
    for call in calls:
        sent, expected = (ranks.run(_on_tensor, *call) for ranks in (carried, simulated))
        torch.testing.assert_close(sent, expected, rtol=0, atol=0)
        # Behind sockets, the call that carries the function is a line more.
        events, simulated_events = (
            [event._replace(lines=event.lines[-1:]) for event in ranks.trace.events]
            for ranks in (carried, simulated)
        )
        assert events == simulated_events


def test_a_rank_cannot_talk_to_itself_and_its_computation_counts_if_it_was_declared() -> None:
    (near, channel), (far, idle) = socket.socketpair(), socket.socketpair()
    carrying = Carrying([near, far], NETWORK, computes=[{2.0: 1}, {}])
    with idle, channel:
        idle.sendall(b"")
        with rank_on(channel, 0, 2) as client:
            x = torch.ones(2)
            with pytest.raises(ValueError, match="cannot send to itself"):
                client.post(Operation(0, "send", "", (0, 1), [x], [], peer=0))
            with pytest.raises(NotImplementedError, match="has no values"):
                dist.send(torch.empty(3, device="meta"), 1)
            client.spend(2.0)
            client.spend(2.0)
            client.spend(1.0)
            assert client.now() == 5.0
        idle.close()
        carrying.join(30)
    assert carrying.fabric.fabric.clock == [2.0, 0.0]


def test_a_fabric_that_is_gone_stops_its_rank() -> None:
    (near, channel), (far, silent) = socket.socketpair(), socket.socketpair()
    carrying = Carrying([near, far], NETWORK, seconds=0.3)
    stopped = []
    with silent, channel:
        with rank_on(channel, 0, 2):
            try:
                dist.recv(torch.empty(1), src=1)
            except FabricStopped as error:
                stopped.append(str(error))
                raise
        carrying.join(30)
    assert isinstance(carrying.error, RankTimeout)
    assert "closed the connection" in stopped[0]
