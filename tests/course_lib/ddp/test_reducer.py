"""Buckets: their number, their order, and the time they take on a slow network."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib import cost_model
from course_lib.bucketing import MEGABYTE, assign_buckets
from course_lib.ddp import DistributedDataParallel
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


def one_step(layers_per_bucket: int) -> tuple[float, float, float]:
    """Return when backward began, when all gradients were computed, and when they were averaged."""
    net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    cap = layers_per_bucket * 4 * WIDTH * WIDTH / MEGABYTE
    wrapped = DistributedDataParallel(net, cap, cap)
    computed = []
    net[0].weight.register_post_accumulate_grad_hook(lambda _: computed.append(clock()))
    for _ in range(2):
        net.zero_grad()
        loss = wrapped(torch.randn(ROWS, WIDTH)).sum()
        dist.barrier()
        start = clock()
        loss.backward()
        end = clock()
    return start, computed[-1], end


@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.parametrize("speed", [1e6, 1e7, 1e9])
@pytest.mark.parametrize("layers_per_bucket", [1, 2])
def test_buckets_overlap_as_their_formula_says(k, speed, layers_per_bucket):
    network, device = Network(latency=2e-4, bandwidth=speed), Device(flops=1e7)
    ranks = Ranks(k, on="simulated", network=network, device=device)
    start, computed, end = ranks.run(one_step, layers_per_bucket)[0]
    launches = [e.start for e in ranks.trace.events if e.kind == "all_reduce" and e.rank == 0]
    assert min(t for t in launches if t >= start) < computed - 1e-12
    layer = 2 * MATMUL / device.flops
    backward = LAYERS * layer - MATMUL / device.flops  # the input of the first needs no gradient
    ready = [(i + 1) * layer for i in range(LAYERS - 1)] + [backward]
    nbytes = layers_per_bucket * 4 * WIDTH * WIDTH
    done = 0.0
    for time in ready[layers_per_bucket - 1 :: layers_per_bucket]:
        done = max(done, time) + cost_model.ring_all_reduce_time(nbytes, k, network)
    assert end - start == pytest.approx(done, rel=0.1)
