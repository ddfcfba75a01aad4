"""The speed of light, against one maximum over a table, and against ranks that overlap."""

from __future__ import annotations

import pytest
import torch

from course_lib.capstone.light import speed_of_light
from course_lib.ranks import Network, Ranks, compute


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("longest", range(3))
def test_it_is_the_largest_time_in_the_table(world_size: int, longest: int) -> None:
    generator = torch.Generator().manual_seed(10 * world_size + longest)
    work = torch.rand(3, world_size, generator=generator, dtype=torch.float64)
    work[longest] *= 50
    speeds = torch.tensor([[4.0], [0.5], [0.5]], dtype=torch.float64)
    flops, sent, received = ((float(number) for number in row) for row in work)
    bound = speed_of_light(flops, sent, received, rate=4.0, bandwidth=0.5)
    assert bound == pytest.approx(float((work / speeds).max()), rel=1e-15)


@pytest.mark.parametrize("seconds", [0.5, 4.0])
def test_ranks_that_overlap_without_latency_reach_it(seconds: float) -> None:
    def exchange(own_seconds: float) -> None:
        import torch.distributed as dist

        handle = dist.all_reduce(torch.zeros(8), async_op=True)  # a ring of 2 ranks: 32 bytes each
        compute(own_seconds)
        handle.wait()

    with Ranks(2, on="simulated", network=Network(latency=0.0, bandwidth=16.0)) as ranks:
        ranks.run(exchange, seconds)
        trace = ranks.trace
    bound = speed_of_light([seconds, 0.0], [32, 32], [32, 32], rate=1.0, bandwidth=16.0)
    assert trace.makespan == pytest.approx(bound)
