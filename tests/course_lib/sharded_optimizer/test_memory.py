"""Bytes per rank: the formula against the paper's table, and against what optimizers hold."""

import pytest

from course_lib.sharded_optimizer import model_state_bytes


@pytest.mark.parametrize("k", [1, 2, 3, 64])
def test_each_stage_divides_one_thing_more(k):
    sums = [16, 4 + 12 / k, 2 + 14 / k, 16 / k]
    for stage, expected in enumerate(sums):
        assert model_state_bytes(1000, k, stage) == pytest.approx(1000 * expected)


@pytest.mark.parametrize(
    ("world_size", "stage", "words"),
    [
        (0, 1, "world_size must be at least 1, got 0"),
        (4, 4, "stage must be 0, 1, 2 or 3, got 4"),
        (4, -1, "stage must be 0, 1, 2 or 3, got -1"),
    ],
)
def test_no_such_stage(world_size, stage, words):
    with pytest.raises(ValueError, match=words):
        model_state_bytes(1, world_size, stage)
