"""CPU ranks on an emulated slow network take the time of the model."""

import os
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib.ranks import Ranks
from course_lib.ranks.costs.collective_time import collective_time
from course_lib.ranks.costs.network import Network

pytestmark = pytest.mark.timeout(120)

SLOW = Network(latency=2e-3, bandwidth=40e6)
ATTEMPTS = 10


def timed(fn: Callable[[], object]) -> float:
    """Return the seconds from a common start to the end of `fn`, on a rank."""
    fn()
    dist.barrier()
    start = time.monotonic()
    fn()
    return time.monotonic() - start


def within_ten_percent(ranks: Ranks, fn: Callable[[], object], model: float) -> None:
    """Fail unless the slowest rank takes the model's time; a busy machine gets some attempts."""
    for _ in range(ATTEMPTS):
        seconds = max(ranks.run(timed, fn))
        if abs(seconds - model) <= 0.1 * model:
            return
    pytest.fail(f"took {1e3 * seconds:.1f} ms, the model says {1e3 * model:.1f} ms")


@pytest.mark.parametrize("k", [2, 3, 4])
def test_all_reduce_takes_the_time_of_a_ring(k: int) -> None:
    nbytes = 4_000_000
    model = 2 * (k - 1) * (SLOW.latency + nbytes / (k * SLOW.bandwidth))
    assert collective_time("all_reduce", SLOW, k, nbytes) == pytest.approx(model)
    with Ranks(k, on="cpu", network=SLOW) as ranks:
        within_ten_percent(ranks, lambda: dist.all_reduce(torch.ones(nbytes // 4)), model)


def test_a_ring_by_hand_takes_the_same_time() -> None:
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
        within_ten_percent(ranks, ring, model)


def test_operations_queue_and_overlap_with_computation() -> None:
    nbytes = 4_000_000

    def two_buckets() -> None:
        works = [dist.all_reduce(torch.ones(nbytes // 4), async_op=True) for _ in range(2)]
        time.sleep(0.1)  # stands for computation: hides behind the first bucket
        for work in works:
            work.wait()

    model = 2 * collective_time("all_reduce", SLOW, 2, nbytes)
    assert model > 0.2
    with Ranks(2, on="cpu", network=SLOW) as ranks:
        within_ten_percent(ranks, two_buckets, model)


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
        within_ten_percent(ranks, fan_out, model)


def test_a_late_rank_delays_a_collective() -> None:
    nbytes = 2_000_000

    def late() -> None:
        time.sleep(0.1 * dist.get_rank())
        dist.all_reduce(torch.ones(nbytes // 4))

    model = 0.1 + collective_time("all_reduce", SLOW, 2, nbytes)
    with Ranks(2, on="cpu", network=SLOW) as ranks:
        within_ten_percent(ranks, late, model)


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
