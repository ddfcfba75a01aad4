"""Every algorithm has had the same tries, and the map takes the best of them."""

from course_lib.who_wins.algorithms import ALGORITHMS, setting_of
from course_lib.who_wins.settings import OPTIMIZERS, Setting, read


def test_all_algorithms_of_the_map_were_tried_alike() -> None:
    tried = read()
    assert list(tried) == [
        name for name, algorithm in ALGORITHMS.items() if algorithm.same_as is None
    ]
    rates = sorted({setting.lr for setting in tried["flat"]})
    for name, tries in tried.items():
        assert list(tries) == [Setting(optimizer, lr) for optimizer in OPTIMIZERS for lr in rates]
        lr = setting_of(name).lr
        assert rates[0] < lr < rates[-1], f"the best of {name} is at an end of the grid"
