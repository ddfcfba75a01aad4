"""The frontier: its increments add up to the step, and it names who delayed it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from course_lib.frontier import frontier, late_rank

SECONDS = st.integers(0, 100)


def step_of(own: torch.Tensor) -> torch.Tensor:
    """Return the stages of a step whose third stage is a sum: nobody ends it before the last."""
    before = own.sum(1)
    return torch.cat([own, (before.max() - before + 1)[:, None]], 1)


@given(
    st.integers(1, 5).flatmap(
        lambda k: st.lists(st.lists(SECONDS, min_size=3, max_size=3), min_size=k, max_size=k)
    )
)
def test_the_increments_add_up_to_the_step_of_the_last_rank(rows):
    durations = step_of(torch.tensor(rows, dtype=torch.float64))
    increments, leaders = frontier(durations)
    ends = [[sum(row[: stage + 1]) for row in durations.tolist()] for stage in range(4)]
    assert increments.sum() == max(ends[-1])
    for stage, leader in enumerate(leaders.tolist()):
        assert leader == ends[stage].index(max(ends[stage]))


@pytest.mark.parametrize("k", [2, 3, 4])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_late_rank_is_named_beside_noise(k, stage):
    generator = torch.Generator().manual_seed(10 * k + stage)
    late = int(torch.randint(k, (1,), generator=generator))
    steps = []
    for _ in range(5):
        own = torch.rand(k, 3, generator=generator) * 0.02
        own[late, stage] += 0.05
        steps.append(step_of(own))
    rank, where, seconds = late_rank(torch.stack(steps))
    assert (rank, where) == (late, stage)
    assert seconds == pytest.approx(0.05, abs=0.02)
