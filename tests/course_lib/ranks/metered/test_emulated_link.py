"""CPU ranks on an emulated slow network: ends by the model's arithmetic, and none before it.

That they are hardly later either, on a machine that has the time, is measured by
`benchmarks/emulated_link.py`.
"""

import os
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib.ranks import Ranks
from course_lib.ranks.board.board import Board
from course_lib.ranks.board.views import Channel, Wait
from course_lib.ranks.costs.collective_time import collective_time
from course_lib.ranks.costs.network import Network
from course_lib.ranks.metered.collective_table import KINDS
from course_lib.ranks.metered.emulated_link import MAX_LAG, EmulatedLink, Transfer
from course_lib.ranks.metered.recorder import MeteredOperation, Recorder

pytestmark = pytest.mark.timeout(120)

SLOW = Network(latency=2e-3, bandwidth=40e6)

# Arithmetic --------------------------------------------------------------------------------------


class Links:
    """The links of K ranks, all in this process, and transfers that began when told."""

    GROUP = 7
    PAST = 1.0  # on the machine's monotonic clock: nothing here has to be waited for

    def __init__(self, k: int) -> None:
        self.members = tuple(range(k))
        self.board = Board.create(k)
        self.slots = [self.board.open_group(rank, self.GROUP, self.members) for rank in range(k)]
        self.links = [EmulatedLink(SLOW, self.board, rank) for rank in range(k)]
        self.recorders = [Recorder(self.board, rank, [], lambda: "") for rank in range(k)]
        self.transfers: list[Transfer] = []

    def _operation(self, rank: int, moment: float, *what: object) -> MeteredOperation:
        kind, peer, nbytes, wait, seq, channel = what
        return MeteredOperation(
            self.recorders[rank], kind, self.members, peer, nbytes, "float32", "", wait,
            self.GROUP, seq, channel, self.PAST + moment,
        )  # fmt: skip

    def collective(self, kind: str, nbytes: int, moments: dict[int, float]) -> list[Transfer]:
        """Let every rank launch it at its moment."""
        transfers = []
        for rank, moment in moments.items():
            seq = self.board.enter_collective(rank, self.slots[rank], kind, "")
            what = (kind, None, nbytes, Wait.COLLECTIVE, seq, None)
            operation = self._operation(rank, moment, *what)
            transfers.append(self.links[rank].carry_collective(operation, None))
        self.transfers += transfers
        return transfers

    def message(self, rank: int, kind: str, peer: int, nbytes: int, moment: float) -> Transfer:
        channel = Channel(kind == "send", peer, 0, self.GROUP)
        seq = self.board.start_message(rank, channel)
        what = (kind, peer, nbytes, Wait.SEND, seq, channel)
        self.transfers.append(self.links[rank].carry_message(self._operation(rank, moment, *what)))
        return self.transfers[-1]

    def close(self) -> None:
        for transfer in self.transfers:
            transfer.future.wait()  # from then on the links leave the board alone
        self.board.close()

    def end(self, transfer: Transfer) -> float:
        """Wait for the end of a transfer and return when it was, by the model."""
        transfer.future.wait()
        return transfer.end - self.PAST


LinksOf = Callable[[int], Links]


@pytest.fixture
def links_of() -> Iterator[LinksOf]:
    made: list[Links] = []

    def make(k: int) -> Links:
        made.append(Links(k))
        return made[-1]

    yield make
    for links in made:
        links.close()


def exactly(seconds: float) -> object:
    """The board keeps moments as whole nanoseconds."""
    return pytest.approx(seconds, rel=0, abs=1e-8)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"send", "recv"}))
def test_a_collective_ends_when_the_model_says(links_of: LinksOf, kind: str, k: int) -> None:
    """Reckoned from the rank that came last."""
    links = links_of(k)
    moments = {rank: 0.5 * rank for rank in range(k)}
    model = collective_time(kind, SLOW, k, 4_000_000, 0, 4)
    for transfer in links.collective(kind, 4_000_000, moments):
        assert links.end(transfer) == exactly(0.5 * (k - 1) + model)


def test_an_all_reduce_takes_the_time_of_a_ring(links_of: LinksOf) -> None:
    nbytes = 4_800_000  # whole numbers for every k
    for k in (2, 3, 4):
        links = links_of(k)
        transfers = links.collective("all_reduce", nbytes, dict.fromkeys(range(k), 1.0))
        model = 2 * (k - 1) * (SLOW.latency + nbytes / (k * SLOW.bandwidth))
        assert [links.end(each) for each in transfers] == [exactly(1.0 + model)] * k


def test_collectives_queue_one_behind_the_other(links_of: LinksOf) -> None:
    links = links_of(2)
    model = collective_time("all_reduce", SLOW, 2, 4_000_000)
    works = [links.collective("all_reduce", 4_000_000, {0: 0.0, 1: 0.01 * i}) for i in range(3)]
    for number, transfers in enumerate(works):
        for transfer in transfers:
            assert links.end(transfer) == exactly((number + 1) * model)


def test_messages_of_one_rank_leave_one_behind_the_other(links_of: LinksOf) -> None:
    nbytes = 2_000_000
    links = links_of(3)
    sends = [links.message(0, "send", peer, nbytes, 0.0) for peer in (1, 2)]
    receives = [links.message(peer, "recv", 0, nbytes, 0.0) for peer in (1, 2)]
    for number in range(2):
        left = (number + 1) * nbytes / SLOW.bandwidth
        assert links.end(sends[number]) == exactly(left)
        assert links.end(receives[number]) == exactly(left + SLOW.latency)


def test_messages_to_one_rank_arrive_one_behind_the_other(links_of: LinksOf) -> None:
    nbytes = 2_000_000
    links = links_of(4)
    sends = [links.message(peer, "send", 0, nbytes, 0.0) for peer in (1, 2, 3)]
    receives = [links.message(0, "recv", peer, nbytes, 0.0) for peer in (1, 2, 3)]
    assert [links.end(send) for send in sends] == [exactly(nbytes / SLOW.bandwidth)] * 3
    arrivals = sorted(links.end(receive) for receive in receives)
    assert arrivals == [exactly(SLOW.latency + i * nbytes / SLOW.bandwidth) for i in (1, 2, 3)]


def test_a_message_starts_when_both_sides_are_ready(links_of: LinksOf) -> None:
    for sent, received in ((0.0, 0.3), (0.3, 0.0)):
        links = links_of(2)
        receive = links.message(1, "recv", 0, 1_000_000, received)
        send = links.message(0, "send", 1, 1_000_000, sent)
        assert links.end(send) == exactly(0.3 + 1_000_000 / SLOW.bandwidth)
        assert links.end(receive) == exactly(0.3 + 1_000_000 / SLOW.bandwidth + SLOW.latency)


def test_a_rank_that_was_woken_late_is_excused_and_one_that_came_late_is_not(
    links_of: LinksOf,
) -> None:
    links = links_of(2)
    link = links.links[0]
    first, second = (
        links.collective("all_reduce", 4_000_000, {0: moment, 1: moment})[0]
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
    """Fail if the slowest rank takes less than the model's time."""
    assert max(ranks.run(timed, fn)) >= model - MAX_LAG


@pytest.mark.parametrize("k", [2, 3, 4])
def test_no_all_reduce_is_faster_than_a_ring(k: int) -> None:
    nbytes = 4_000_000
    model = 2 * (k - 1) * (SLOW.latency + nbytes / (k * SLOW.bandwidth))
    assert collective_time("all_reduce", SLOW, k, nbytes) == pytest.approx(model)
    with Ranks(k, on="cpu", network=SLOW) as ranks:
        not_before(ranks, lambda: dist.all_reduce(torch.ones(nbytes // 4)), model)


def test_nor_a_ring_by_hand() -> None:
    k, nbytes = 3, 6_000_000

    def ring() -> None:
        rank = dist.get_rank()
        mine, theirs = torch.ones(nbytes // 4 // k), torch.empty(nbytes // 4 // k)
        for _ in range(2 * (k - 1)):
            request = dist.isend(mine, (rank + 1) % k)
            dist.recv(theirs, (rank - 1) % k)
            request.wait()

    model = 2 * (k - 1) * (SLOW.latency + nbytes / (k * SLOW.bandwidth))
    with Ranks(k, on="cpu", network=SLOW) as ranks:
        not_before(ranks, ring, model)


def test_nor_operations_that_queue_beside_computation() -> None:
    nbytes = 4_000_000

    def two_buckets() -> None:
        works = [dist.all_reduce(torch.ones(nbytes // 4), async_op=True) for _ in range(2)]
        time.sleep(0.1)  # stands for computation: hides behind the first bucket
        for work in works:
            work.wait()

    model = 2 * collective_time("all_reduce", SLOW, 2, nbytes)
    assert model > 0.2
    with Ranks(2, on="cpu", network=SLOW) as ranks:
        not_before(ranks, two_buckets, model)


def test_sends_of_one_rank_share_its_link() -> None:
    nbytes = 2_000_000

    def fan_out() -> None:
        x = torch.ones(nbytes // 4)
        if dist.get_rank() == 0:
            for request in [dist.isend(x, 1), dist.isend(x, 2)]:
                request.wait()
        else:
            dist.recv(x, 0)

    model = SLOW.latency + 2 * nbytes / SLOW.bandwidth
    with Ranks(3, on="cpu", network=SLOW) as ranks:
        not_before(ranks, fan_out, model)


def test_a_late_rank_delays_a_collective() -> None:
    nbytes = 2_000_000

    def late() -> None:
        time.sleep(0.1 * dist.get_rank())
        dist.all_reduce(torch.ones(nbytes // 4))

    model = 0.1 + collective_time("all_reduce", SLOW, 2, nbytes)
    with Ranks(2, on="cpu", network=SLOW) as ranks:
        not_before(ranks, late, model)


def test_values_are_right_and_ddp_runs() -> None:
    def program() -> tuple[float, torch.Tensor]:
        rank = dist.get_rank()
        x = torch.tensor([float(rank)])
        dist.all_reduce(x)
        torch.manual_seed(0)
        ddp = nn.parallel.DistributedDataParallel(nn.Linear(3, 2), bucket_cap_mb=1e-5)
        ddp(torch.full((1, 3), float(rank))).sum().backward()
        return x.item(), ddp.module.weight.grad

    with Ranks(2, on="cpu", network=SLOW) as ranks:
        for total, gradient in ranks.run(program):
            assert total == 1
            assert torch.equal(gradient, torch.full((2, 3), 0.5))
        assert ranks.trace.calls(0)["all_reduce"] >= 2


def test_what_is_not_emulated_is_refused() -> None:
    with pytest.raises(ValueError, match='topologies, nodes and jitter use on="simulated"'):
        Ranks(2, on="cpu", network=Network(1e-3, 1e9, jitter=0.5))
    with pytest.raises(ValueError, match="metered CPU ranks"):
        Ranks(2, on="cpu", network=SLOW, metered=False)
    with pytest.raises(ValueError, match='are for on="simulated"'):
        Ranks(2, on="cpu", computation="declared")


def test_without_a_network_there_is_no_link() -> None:
    with Ranks(2, on="cpu") as ranks:
        threads = ranks.run(lambda: [os.getpid(), len(os.listdir("/proc/self/task"))])
    with Ranks(2, on="cpu", network=SLOW) as ranks:
        more = ranks.run(lambda: [os.getpid(), len(os.listdir("/proc/self/task"))])
    assert more[0][1] == threads[0][1] + 1
