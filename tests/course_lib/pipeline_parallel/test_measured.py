"""Ranks that run a schedule do what its simulation says, and take as long."""

import pytest
import torch
from torch import nn

from course_lib.pipeline_parallel import (
    Pipeline,
    bubble_fraction,
    simulate,
    split_layers,
    zero_bubble_fraction,
)
from course_lib.ranks import Device, Network, Ranks, clock
from tests.helpers.pipelines import SCHEDULES, schedule

D = 16
M = 6
FLOPS = 1e6
FORWARD = 2 * D**3 * 2 / FLOPS  # seconds: two square products of a micro-batch with D rows


def step_of(name, k):
    """Return when this rank began and was done: a step after the one in which shapes are learned.

    Stages are products of square matrices, so that F, I and W take equally long. The inputs require
    gradients, or the first stage would have less to do.
    """
    plan = schedule(name, k, M)
    layers = [nn.Linear(D, D, bias=False) for _ in range(2 * k)]
    stages = split_layers(nn.Sequential(*layers), plan.stages)
    pipeline = Pipeline(stages, lambda y, _: y.sum(), plan)
    x = torch.ones(M * D, D, requires_grad=True)
    pipeline.step(x, x.detach())
    torch.distributed.barrier()
    begin = clock()
    pipeline.step(x, x.detach())
    return begin, clock()


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_measured_bubble_is_that_of_the_formula(k, name):
    """On simulated ranks whose operators take what their arithmetic takes, and messages nothing."""
    network = Network(latency=0.0, bandwidth=float("inf"))
    with Ranks(k, on="simulated", network=network, device=Device(flops=FLOPS)) as ranks:
        times = ranks.run(step_of, name, k)
    took = max(end for _, end in times) - min(begin for begin, _ in times)
    backward = 2 * FORWARD
    work = M * (FORWARD + backward)
    plan = schedule(name, k, M)
    run = simulate(plan, FORWARD, backward)
    assert took == pytest.approx(run.makespan, rel=1e-9)
    if name in ("gpipe", "1f1b", "interleaved"):
        assert 1 - work / took == pytest.approx(bubble_fraction(k, M, plan.chunks), abs=1e-9)
    if name == "zero_bubble":
        fraction = zero_bubble_fraction(k, M, FORWARD, backward, FORWARD)
        assert 1 - work / took == pytest.approx(fraction, abs=1e-9)
