"""Every algorithm has had the same tries, and the map takes the best of them."""

import math

import pytest

from course_lib.who_wins.algorithms import ALGORITHMS, setting_of
from course_lib.who_wins.settings import OPTIMIZERS, Setting, best, read


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
    rates = sorted({setting.lr for setting in tried["flat"]})
    for name, tries in tried.items():
        assert list(tries) == [Setting(each, lr) for each in OPTIMIZERS for lr in rates]
        lr = setting_of(name).lr
        assert rates[0] < lr < rates[-1], f"the best of {name} is at an end of the grid"
