"""Every algorithm has had the same tries, and the map takes the best of them."""

import math
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib.who_wins.algorithms import ALGORITHMS, learning_rate
from course_lib.who_wins.rates import GRID, best, rate_of, read, write

STEPS = st.one_of(st.just(math.inf), st.integers(10, 960).map(lambda tenths: tenths / 10))


@given(st.lists(st.lists(STEPS, min_size=3, max_size=3), min_size=1, max_size=4))
def test_what_is_written_is_read(rows: list[list[float]]) -> None:
    tried = {
        f"algorithm {i}": dict(zip((0.01, 0.1, 1.0), steps, strict=True))
        for i, steps in enumerate(rows)
        if min(steps) < math.inf
    }
    if not tried:
        return
    with tempfile.TemporaryDirectory() as folder:
        write(tried, "made by\na test", Path(folder) / "rates.csv")
        assert read(Path(folder) / "rates.csv") == tried


def test_the_best_has_the_fewest_steps_and_is_the_smaller_of_two() -> None:
    assert best({0.1: math.inf, 0.2: 30.0, 0.4: 20.0}) == 0.4
    assert best({0.4: 20.0, 0.2: 20.0, 0.1: 21.0}) == 0.2
    with pytest.raises(ValueError, match="none of the learning rates"):
        best({0.1: math.inf})


def test_all_algorithms_of_the_map_were_tried_alike() -> None:
    tried = read()
    assert list(tried) == [name for name, each in ALGORITHMS.items() if each.same_as is None]
    for name, tries in tried.items():
        assert tuple(tries) == GRID
        first, last = GRID[0], GRID[-1]
        assert first < learning_rate(name) < last, f"the best of {name} is at an end of the grid"


def test_who_was_not_tuned_is_told_how() -> None:
    with pytest.raises(ValueError, match=r"guess has no learning rate .*--tune --write"):
        rate_of("guess")
    assert learning_rate("ring") == learning_rate("bucketed") == rate_of("flat")
