"""Ranks that are processes, on the fabric behind a socket, do what those that are threads do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from course_lib.ranks.costs.network import Network
from course_lib.ranks.explain.errors import RankError, RanksError
from course_lib.ranks.ranks import Ranks
from tests.helpers import collectives_by_hand as by_hand
from tests.helpers.every_operation import assert_same, everything
from tests.helpers.faulty_programs import CASES
from tests.helpers.mixed_program import mixed
from tests.helpers.socket_ranks import SocketRanks
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


@pytest.mark.parametrize(("fn", "error", "texts"), CASES, ids=[fn.__name__ for fn, *_ in CASES])
def test_found_and_explained(
    processes: dict[int, Ranks],
    fn: Callable[[], None],
    error: type[RanksError],
    texts: list[str],
) -> None:
    ranks = SocketRanks(processes[4])
    with pytest.raises(error) as caught:  # at the time limit it would be a `RankTimeout`
        ranks.run(fn)
    if error is not RankError:  # its exception stays on the rank
        for text in texts:
            assert text in str(caught.value)
    assert ranks.run(dist.get_rank) == [0, 1, 2, 3]
