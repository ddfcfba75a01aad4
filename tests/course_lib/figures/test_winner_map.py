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
