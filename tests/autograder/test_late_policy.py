"""The late policy: a share for each day that has begun, after the free ones, at most all points."""

from __future__ import annotations

import pytest
from traitlets import TraitError

from autograder.late_policy import PerDay

HOUR = 3600


TENTH = {"share": 0.1}
FREE = {"share": 0.1, "free_days": 1}
GRACE = {"share": 0.1, "grace_minutes": 5, "largest": 0.5}


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("options", "hours", "lost"),
    [(TENTH, 1, 1), (TENTH, 24, 1), (TENTH, 25, 2), (TENTH, 24 * 30, 10), (FREE, 24, None),
     (FREE, 25, 1), ({"share": 1.0}, 1, 10), ({"share": 0.0}, 99, 0), (GRACE, 4 / 60, None),
     (GRACE, 6 / 60, 1), (GRACE, 24 + 4 / 60, 1), (GRACE, 24.1, 2), (GRACE, 24 * 30, 5)],
)  # fmt: skip
def test_points_lost_of_ten(options: dict[str, float], hours: float, lost: float | None) -> None:
    assert PerDay(**options).late_submission_penalty("ada", 10, hours * HOUR) == (
        None if lost is None else pytest.approx(lost)
    )


def test_a_share_is_between_0_and_1() -> None:
    with pytest.raises(TraitError):
        PerDay(share=10.0)
