"""CPU ranks on an emulated slow network: ends by the model's arithmetic, and none before it.

That they are hardly later either, on a machine that has the time, is measured by
`benchmarks/emulated_link.py`.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing import Pipe

import pytest
import torch
import torch.distributed as dist

from course_lib.ranks import Ranks
from course_lib.ranks._torch.collective_table import KINDS
from course_lib.ranks.costs.collective_time import collective_time
from course_lib.ranks.costs.network import Network
from course_lib.ranks.processes.board import Board
from course_lib.ranks.processes.board_views import MessageChannel, Wait
from course_lib.ranks.processes.emulated_network import (
    MAX_LAG,
    EmulatedLink,
    EmulatedNetwork,
    Transfer,
)
from course_lib.ranks.processes.rank_recorder import MeteredOperation, RankRecorder
from course_lib.ranks.trace.event import Event
from tests.helpers.collective_cases import launch
from tests.helpers.every_operation import assert_same, everything

SLOW = Network(latency=2e-3, bandwidth=40e6)
BUSY = replace(SLOW, overhead=3e-3)

# Arithmetic --------------------------------------------------------------------------------------


class Links:
    """The links of K ranks, all in this process, and transfers that began when told.

    The network's clock stands still until somebody asks for an end: by then all have begun.
    """

    GROUP = 7
    PAST = 1.0  # on the machine's monotonic clock: nothing here has to be waited for

    def __init__(self, k: int, network: Network = SLOW) -> None:
        self.members = tuple(range(k))
        self.board = Board.create(k)
        self.goes = threading.Event()
        pipes = [Pipe() for _ in range(k)]
        self.network = EmulatedNetwork(network, [ours for ours, _ in pipes], self._clock)
        self.links = [EmulatedLink(theirs) for _, theirs in pipes]
        self.recorders = [RankRecorder(self.board, rank, [], lambda: "") for rank in range(k)]
        self.count = 0

    def _clock(self) -> float:
        return time.monotonic() if self.goes.is_set() else self.PAST - 0.01

    def _carry(
        self, rank: int, moment: float, sizes: Sequence[int], kind: str, peer: int | None,
        channel: MessageChannel | None = None,
    ) -> Transfer:  # fmt: skip
        start, all_bytes = self.PAST + moment, sum(sizes)
        event = Event(
            rank, kind, self.members, peer, all_bytes, "float32", self.count, start,
            start, "",
        )  # fmt: skip
        operation = MeteredOperation(
            self.recorders[rank], event, Wait.COLLECTIVE, self.GROUP, channel
        )
        return self.links[rank].carry(operation, sizes, None)

    def collective(
        self,
        kind: str,
        sizes: Sequence[Sequence[int]],
        moments: dict[int, float],
        root: int | None = None,
    ) -> list[Transfer]:
        """Let every rank launch it at its moment; `sizes`: by rank, bytes of what it puts in."""
        self.count += 1
        return [self._carry(r, moment, sizes[r], kind, root) for r, moment in moments.items()]

    def message(self, rank: int, kind: str, peer: int, nbytes: int, moment: float) -> Transfer:
        """Let one side start a message: the only one between the two."""
        self.count = 1
        channel = MessageChannel(kind == "send", peer, 0, self.GROUP)
        return self._carry(rank, moment, [nbytes], kind, peer, channel)

    def end(self, transfer: Transfer) -> float:
        """Wait for the end of a transfer and return when it was, by the model."""
        self.goes.set()
        assert transfer.end_known.wait(300)
        return transfer.end - self.PAST


LinksOf = Callable[..., Links]


@pytest.fixture
def links_of() -> Iterator[LinksOf]:
    made: list[Links] = []

    def make(k: int, network: Network = SLOW) -> Links:
        made.append(Links(k, network))
        return made[-1]

    yield make
    for links in made:
        links.board.close()


def exactly(seconds: float) -> object:
    return pytest.approx(seconds, rel=0, abs=1e-8)


def sizes_of(kind: str, k: int, nbytes: int, root: int) -> list[list[int]]:
    """Return the bytes of what each rank puts in."""
    if kind == "barrier":
        return [[]] * k
    if kind == "scatter":
        return [[nbytes] * k if rank == root else [] for rank in range(k)]
    if kind in ("reduce_scatter", "all_to_all"):
        return [[nbytes // k] * k] * k
    return [[nbytes]] * k


def simulated_ends(
    k: int, fn: Callable[..., object], *args: object, network: Network = SLOW
) -> dict[int, float]:
    """Return when the last operation of each rank ends on simulated ranks."""
    ranks = Ranks(k, on="simulated", network=network)
    ranks.run(fn, *args)
    events, start = ranks.trace.events, min(event.start for event in ranks.trace.events)
    return {rank: max(e.end for e in events if e.rank == rank) - start for rank in range(k)}


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"send", "recv"}))
@pytest.mark.parametrize(("k", "network"), [(1, SLOW), (3, SLOW), (4, BUSY)])
def test_an_emulated_collective_ends_when_a_simulated_one_does(
    links_of: LinksOf, kind: str, k: int, network: Network
) -> None:
    n, root, links = 840_000, k - 1, links_of(k, network)
    sizes = sizes_of(kind, k, 4 * n, root)
    rooted = root if KINDS[kind].to_one else None
    transfers = links.collective(kind, sizes, dict.fromkeys(range(k), 0.0), rooted)
    ends = [links.end(transfer) for transfer in transfers]
    simulated = simulated_ends(k, launch, kind, n, root, network=network)
    assert ends == [exactly(simulated[rank]) for rank in range(k)]


def test_a_rank_that_was_woken_late_is_excused_and_one_that_came_late_is_not(
    links_of: LinksOf,
) -> None:
    links = links_of(2)
    link = links.links[0]
    first, second = (
        links.collective("all_reduce", [[4_000_000]] * 2, {0: moment, 1: moment})[0]
        for moment in (0.0, 1.0)
    )
    links.end(first), links.end(second)
    first.woke(first.end - 0.1, first.end + 0.002)
    assert link.lag == exactly(0.002)
    first.woke(first.end + 0.5, first.end + 0.5)  # waits again, for what is long over
    assert link.lag == exactly(0.002)
    late = links.message(0, "send", 1, 1_000_000, 2.0)
    links.message(1, "recv", 0, 1_000_000, 0.0)
    assert links.end(late) == exactly(2.0 - 0.002 + 1_000_000 / SLOW.bandwidth)
    second.woke(second.end - 0.1, second.end)  # woken in time
    assert link.lag == exactly(0.0)
    second.woke(second.end - 0.1, second.end + 1.0)
    assert link.lag == MAX_LAG


# On ranks ----------------------------------------------------------------------------------------


def timed(fn: Callable[[], object]) -> float:
    """Return the seconds from a common start to the end of `fn`, on a rank."""
    fn()
    dist.barrier()
    start = time.monotonic()
    fn()
    return time.monotonic() - start


def not_before(ranks: Ranks, fn: Callable[[], object], model: float) -> None:
    """Fail if the slowest rank takes less than the model's time.

    On a busy machine a rank may begin a few milliseconds after the others, and so measure less. A
    network that forgot a message would be at least a sixth faster.
    """
    assert max(ranks.run(timed, fn)) >= 0.9 * model


def test_no_all_reduce_is_faster_than_a_ring() -> None:
    k = 3
    nbytes = 4_000_000
    model = 2 * (k - 1) * (SLOW.latency + nbytes / (k * SLOW.bandwidth))
    assert collective_time("all_reduce", SLOW, k, nbytes) == pytest.approx(model)
    with Ranks(k, on="cpu", network=SLOW) as ranks:
        not_before(ranks, lambda: dist.all_reduce(torch.ones(nbytes // 4)), model)


def test_a_callback_may_wait_for_the_next_operation() -> None:
    """As that of PyTorch's PowerSGD hook does."""

    def program() -> float:
        def again(first: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            (x,) = first.value()
            dist.all_reduce(x)
            second = dist.all_reduce(x, async_op=True)
            assert second is not None
            return second.get_future().wait()[0]

        first = dist.all_reduce(torch.ones(1), async_op=True)
        assert first is not None
        return first.get_future().then(again).wait().item()

    with Ranks(2, on="cpu", network=SLOW, timeout=20) as ranks:
        assert ranks.run(program) == [8, 8]


def test_every_operation_gives_the_same_values_as_without_it() -> None:
    with Ranks(2, on="cpu", network=Network(1e-5, 1e10)) as slow, Ranks(2, on="cpu") as plain:
        for ours, theirs in zip(slow.run(everything, 5), plain.run(everything, 5), strict=True):
            assert_same(list(ours.values()), list(theirs.values()), "everything")


def test_what_is_not_emulated_is_refused() -> None:
    with pytest.raises(ValueError, match='topologies and nodes use on="simulated"'):
        Ranks(2, on="cpu", network=Network(1e-3, 1e9, topology="ring"))
    with pytest.raises(ValueError, match="without metered=False"):
        Ranks(2, on="cpu", network=SLOW, metered=False)
    with pytest.raises(ValueError, match='work only with on="simulated"'):
        Ranks(2, on="cpu", computation="declared")
