"""A map of winners covers every place once, and does not speak by colour alone."""

import itertools

import matplotlib.pyplot as plt
import pytest

from course_lib.figures import winner_map

pytestmark = pytest.mark.usefixtures("fresh_matplotlib")


def test_a_map_covers_every_place_once_and_names_each_winner():
    _, ax = plt.subplots()
    rows = {3: ["a", "a", "b", "b"], 4: ["a", "b", "b", "b"], 5: ["b", "b", "b", "c"]}
    winner_map(ax, [1, 10, 100, 1000], rows)
    assert sorted(text.get_text() for text in ax.texts) == ["a", "b", "c"]
    boxes = [path.get_extents() for bars in ax.collections for path in bars.get_paths()]
    for y in rows:
        row = sorted((b.x0, b.x1) for b in boxes if b.y0 < y < b.y1)
        assert (row[0][0], row[-1][1]) == (1, 1000)
        joints = [(a[1], b[0]) for a, b in itertools.pairwise(row)]
        assert all(right == pytest.approx(left) for right, left in joints)
    (at,) = (text.get_position() for text in ax.texts if text.get_text() == "b")
    assert at[1] == 5  # where it is the widest
    assert len({bars.get_hatch() for bars in ax.collections}) == 3  # not by colour alone


def test_the_name_stands_in_the_middle_of_its_area_not_in_a_long_thin_part():
    _, ax = plt.subplots()
    wide, thin = ["b", "a", "a", "a", "a", "b"], ["a"] * 6
    winner_map(ax, [10**i for i in range(6)], {y: thin if y == 9 else wide for y in range(2, 10)})
    (at,) = (text.get_position() for text in ax.texts if text.get_text() == "a")
    assert 4 <= at[1] <= 7


def test_maps_with_the_same_names_give_them_the_same_look():
    looks = []
    for rows in ({4: ["b", "b"]}, {3: ["c", "c"], 4: ["b", "b"]}):
        _, ax = plt.subplots()
        winner_map(ax, [1, 10], rows, ["a", "b", "c"])
        assert sorted(text.get_text() for text in ax.texts) == sorted(
            row[0] for row in rows.values()
        )
        (bars,) = (each for each in ax.collections if each.get_paths()[0].get_extents().y0 == 3.5)
        looks.append((bars.get_hatch(), tuple(bars.get_facecolor()[0])))
    assert looks[0] == looks[1]


def test_a_map_with_a_gap_is_refused():
    _, ax = plt.subplots()
    with pytest.raises(ValueError, match="winners\\[7\\] must have 2 names, one for each x, got 1"):
        winner_map(ax, [1, 10], {7: ["a"]})
