"""Formulas of failures beside histories of them, and beside the papers' limits."""

import math
from dataclasses import replace
from statistics import mean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib.simulate.failures import Fleet, best_interval, replay, restarting, young_interval

YEAR = 365 * 24 * 3600.0
FLEET = Fleet(16384, 5 * YEAR)


@pytest.mark.parametrize("devices", [1000, 16384, 100_000])
def test_histories_have_the_share_of_the_formula(devices: int) -> None:
    fleet = replace(FLEET, devices=devices)
    shares = [replay(fleet, 300 * fleet.mtbf, seed=seed) for seed in range(60)]
    error = stdev(shares) / math.sqrt(len(shares))
    assert mean(shares) == pytest.approx(restarting(fleet), abs=4 * error)


@given(devices=st.integers(100, 200_000), checkpoint=st.floats(1, 300), restart=st.floats(0, 1200))
def test_dalys_interval_is_the_best_one(devices: int, checkpoint: float, restart: float) -> None:
    fleet = Fleet(devices, 5 * YEAR, checkpoint, restart)
    best = best_interval(fleet)
    share = restarting(fleet)
    for factor in (0.5, 0.8, 1.25, 2.0):  # an estimate of higher order: others gain nothing
        assert restarting(fleet, factor * best) <= share * (1 + 1e-4)
    if checkpoint < fleet.mtbf / 100:
        assert best == pytest.approx(young_interval(fleet), rel=0.1)
