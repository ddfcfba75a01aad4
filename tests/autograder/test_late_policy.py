"""The late policy: a share for each day that has begun, after the free ones, at most all points."""

from __future__ import annotations

import pytest
from traitlets import TraitError

from autograder.late_policy import PerDay

HOUR = 3600


@pytest.mark.parametrize(
    ("share", "free", "hours", "lost"),
    [(0.1, 0, 1, 1), (0.1, 0, 24, 1), (0.1, 0, 25, 2), (0.1, 1, 24, None), (0.1, 1, 25, 1),
     (0.1, 0, 24 * 30, 10), (1.0, 0, 1, 10), (0.0, 0, 99, 0)],
)  # fmt: skip
def test_points_lost_of_ten(share: float, free: int, hours: float, lost: float | None) -> None:
    policy = PerDay(share=share, free_days=free)
    assert policy.late_submission_penalty("ada", 10, hours * HOUR) == (
        None if lost is None else pytest.approx(lost)
    )


@pytest.mark.parametrize(
    ("hours", "lost"), [(4 / 60, None), (6 / 60, 1), (24 + 4 / 60, 1), (24.1, 2), (24 * 30, 5)]
)
def test_minutes_of_grace_and_a_largest_share(hours: float, lost: float | None) -> None:
    policy = PerDay(share=0.1, grace_minutes=5, largest=0.5)
    assert policy.late_submission_penalty("ada", 10, hours * HOUR) == (
        None if lost is None else pytest.approx(lost)
    )


def test_a_share_is_between_0_and_1() -> None:
    with pytest.raises(TraitError):
        PerDay(share=10.0)
