"""Every algorithm has had the same tries, and the map takes the best of them."""

import math
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib.who_wins.algorithms import ALGORITHMS, setting_of
from course_lib.who_wins.settings import GRID, OPTIMIZERS, Setting, best, read, tuned, write

EVERY = [Setting(optimizer, lr) for optimizer in ("SGD", "AdamW") for lr in (0.01, 0.1, 1.0)]
STEPS = st.one_of(st.just(math.inf), st.integers(10, 960).map(lambda tenths: tenths / 10))


@given(st.lists(st.lists(STEPS, min_size=6, max_size=6), min_size=1, max_size=4))
def test_what_is_written_is_read(rows: list[list[float]]) -> None:
    tried = {
        f"algorithm {i}": dict(zip(EVERY, steps, strict=True))
        for i, steps in enumerate(rows)
        if min(steps) < math.inf
    }
    if not tried:
        return
    with tempfile.TemporaryDirectory() as folder:
        write(tried, "made by\na test", Path(folder) / "settings.csv")
        assert read(Path(folder) / "settings.csv") == tried


def test_the_best_has_the_fewest_steps_and_is_the_smaller_of_two() -> None:
    small, middle, large = (Setting("SGD", lr) for lr in (0.1, 0.2, 0.4))
    other = Setting("AdamW", 0.1)
    assert best({small: math.inf, middle: 30.0, large: 20.0}) == large
    assert best({large: 20.0, middle: 20.0, small: 21.0, other: 20.5}) == middle
    assert best({large: 20.0, other: 19.0}) == other
    with pytest.raises(ValueError, match="none of the 1 settings"):
        best({small: math.inf})


def test_all_algorithms_of_the_map_were_tried_alike() -> None:
    tried = read()
    assert list(tried) == [name for name, each in ALGORITHMS.items() if each.same_as is None]
    for name, tries in tried.items():
        assert list(tries) == [Setting(each, lr) for each in OPTIMIZERS for lr in GRID]
        lr = setting_of(name).lr
        assert GRID[0] < lr < GRID[-1], f"the best of {name} is at an end of the grid"


def test_who_was_not_tuned_is_told_how() -> None:
    with pytest.raises(ValueError, match=r"guess has no setting .*--tune --write"):
        tuned("guess")
    assert setting_of("flat, ring") == setting_of("bucketed") == tuned("flat")
