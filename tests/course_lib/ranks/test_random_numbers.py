"""Each rank draws its own numbers from Python and NumPy, as fresh processes do."""

import random

import numpy as np
import pytest

from course_lib.ranks import Ranks
from course_lib.ranks.processes.fork_client import preload


def draw() -> tuple[float, float]:
    return random.random(), float(np.random.rand())


@pytest.mark.parametrize("on", ["cpu", "simulated"])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_no_two_ranks_draw_the_same(on, k: int) -> None:
    preload(["numpy.random"])  # the state that the fork server has, its forks have as well
    drawn = []
    for _ in range(2 if on == "cpu" else 1):  # simulated ranks begin each call with the same seed
        with Ranks(k, on=on) as ranks:
            drawn += ranks.run(draw)
    for numbers in zip(*drawn, strict=True):
        assert len(set(numbers)) == len(drawn), numbers
