"""Bytes per rank: the formula against the paper's table, and against what optimizers hold."""

import pytest

from course_lib.sharded_optimizer import model_state_bytes


@pytest.mark.parametrize("k", [1, 2, 3, 64])
def test_each_stage_divides_one_thing_more(k):
    sums = [16, 4 + 12 / k, 2 + 14 / k, 16 / k]
    for stage, expected in enumerate(sums):
        assert model_state_bytes(1000, k, stage) == pytest.approx(1000 * expected)
