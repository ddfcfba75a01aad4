"""The speed of light, against one maximum over a table."""

import pytest
import torch

from course_lib.capstone.light import speed_of_light


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
