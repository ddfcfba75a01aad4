"""Buckets: their number, their order, and the time they take on a slow network."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib import cost_model
from course_lib.bucketing import MEGABYTE, assign_buckets
from course_lib.ddp import DistributedDataParallel
from course_lib.gradient_sync import sync_flat, sync_per_parameter
from course_lib.ranks import Ranks
from course_lib.ranks.costs.computation import clock
from course_lib.ranks.costs.network import Device, Network
from tests.helpers.ddp_scenarios import SMALL_CAP, STEPS, mlp, train


@pytest.mark.parametrize("cap", [0.0, 100 / MEGABYTE, SMALL_CAP, 25])
def test_number_and_size_of_collectives(ranks_of, cap):
    ranks = ranks_of("simulated", 3)
    ranks.run(train, DistributedDataParallel, cap)
    params = list(mlp().parameters())
    buckets = assign_buckets(params, cap)
    nbytes = [sum(8 * params[i].numel() for i in bucket) for bucket in buckets]
    for rank in range(3):
        sent = [e.bytes for e in ranks.trace.events if e.rank == rank and e.kind == "all_reduce"]
        # The gradients come from the last to the first, weight before bias or not: by the step.
        assert sent[: len(nbytes)] == nbytes
        assert sum(sent) == STEPS * sum(nbytes)


WIDTH, LAYERS, ROWS = 32, 6, 5
MATMUL = 2 * ROWS * WIDTH * WIDTH  # floating-point operations of one product of matrices


def one_step(strategy: str) -> tuple[float, float, float]:
    """Return when backward began, when all gradients were computed, and when they were averaged."""
    net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    x = torch.randn(ROWS, WIDTH)
    cap = 0 if strategy == "ddp" else 2 * 4 * WIDTH * WIDTH / MEGABYTE
    wrapped = DistributedDataParallel(net, cap, cap) if "ddp" in strategy else net
    sync = {"flat": sync_flat, "per parameter": sync_per_parameter}.get(strategy)
    computed = []
    net[0].weight.register_post_accumulate_grad_hook(lambda _: computed.append(clock()))
    for _ in range(2):
        net.zero_grad()
        loss = wrapped(x).sum()
        dist.barrier()
        start = clock()
        loss.backward()
        if sync:
            sync(net.parameters())
        end = clock()
    return start, computed[-1], end


@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.parametrize("speed", [1e6, 1e7, 1e9])
def test_the_ladder_on_a_slow_network(k, speed):
    """Per parameter > flat > buckets that overlap, each as long as its formula says."""
    network, device = Network(latency=2e-4, bandwidth=speed), Device(flops=1e7)
    ranks = Ranks(k, on="simulated", network=network, device=device)
    layer, nbytes = 2 * MATMUL / device.flops, 4 * WIDTH * WIDTH
    backward = LAYERS * layer - MATMUL / device.flops  # the input of the first needs no gradient
    times, first_launch = {}, {}
    for strategy in ("per parameter", "flat", "ddp", "ddp, two layers per bucket"):
        start, computed, end = ranks.run(one_step, strategy)[0]
        times[strategy] = end - start
        launches = [e.start for e in ranks.trace.events if e.kind == "all_reduce" and e.rank == 0]
        first_launch[strategy] = min(t for t in launches if t >= start)
        before_the_end = first_launch[strategy] < computed - 1e-12
        assert before_the_end == strategy.startswith("ddp"), strategy
    layer_time = cost_model.ring_all_reduce_time(nbytes, k, network)
    every = cost_model.ring_all_reduce_time(LAYERS * nbytes, k, network)
    ready = [(i + 1) * layer for i in range(LAYERS - 1)] + [backward]
    in_pairs = overlapped(ready[1::2], cost_model.ring_all_reduce_time(2 * nbytes, k, network))
    expected = {
        "per parameter": backward + LAYERS * layer_time,
        "flat": backward + every,
        "ddp": overlapped(ready, layer_time),
        "ddp, two layers per bucket": in_pairs,
    }
    for strategy, time in times.items():
        assert time == pytest.approx(expected[strategy], rel=0.1), strategy
    best = min(times["ddp"], times["ddp, two layers per bucket"])
    assert times["per parameter"] > times["flat"] > best


def overlapped(ready: list[float], duration: float) -> float:
    end = 0.0
    for time in ready:
        end = max(end, time) + duration
    return end
