"""A graph has a line for each pair in which one hears the other, and arrows to rank 0 only."""

import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.collections import PathCollection
from matplotlib.colors import to_rgb
from matplotlib.path import Path
from matplotlib.text import Annotation

from course_lib.decentralized import (
    complete_mixing,
    exponential_mixing,
    ring_mixing,
    torus_mixing,
)
from course_lib.figures import communication_graph

pytestmark = pytest.mark.usefixtures("fresh_matplotlib")


@pytest.mark.parametrize("columns", [0, 4])
@pytest.mark.parametrize("mixing", [ring_mixing(16), exponential_mixing(16), torus_mixing(4, 4)])
def test_whom_rank_0_hears_has_an_arrow_and_everybody_a_number(mixing, columns):
    _, ax = plt.subplots()
    communication_graph(ax, mixing.tolist(), columns=columns)
    arrows = [text for text in ax.texts if isinstance(text, Annotation)]
    numbers = {text.get_position(): int(text.get_text()) for text in ax.texts if text not in arrows}
    ends = [(numbers[arrow.xyann], numbers[arrow.xy]) for arrow in arrows]
    assert {end for _, end in ends} == {0}
    for start, *_, end in (path.vertices for path in lines_of(ax)):
        ends.append((numbers[tuple(start)], numbers[tuple(end)]))
    heard = torch.zeros(16, 16, dtype=torch.bool)
    for start, end in ends:
        heard[end, start] = True
    assert torch.equal(heard, (mixing > 0) & ~torch.eye(16, dtype=torch.bool))
    assert len(ends) == heard.sum()
    assert sorted(numbers.values()) == list(range(16))


def test_a_bent_line_takes_the_way_of_a_bent_arrow() -> None:
    """Rank 3 hears 0 and 0 hears 3, the far ends of a row: the two ways are symmetric."""
    figure, ax = plt.subplots()
    communication_graph(ax, torus_mixing(4, 4).tolist(), columns=4)
    figure.canvas.draw()
    (arrow,) = (text for text in ax.texts if isinstance(text, Annotation) and text.xyann == (3, 0))
    (line,) = (p for p in lines_of(ax) if tuple(p.vertices[0]) == (0, 0) and p.vertices[-1][0] == 3)
    whole = arrow.arrow_patch.get_connectionstyle()((0, 0), (3, 0), shrinkA=0, shrinkB=0)
    assert line.vertices == pytest.approx(whole.vertices)
    assert list(line.codes) == list(whole.codes) == [Path.MOVETO, Path.CURVE3, Path.CURVE3]


@pytest.mark.parametrize("count", [4, 8, 10, 12, 16])
def test_no_line_on_a_circle_runs_behind_a_third_rank(count: int) -> None:
    """With room for a dot of 10.6 points on a circle of 79, as in lecture 08."""
    _, ax = plt.subplots()
    communication_graph(ax, complete_mixing(count).tolist())
    places = [dot.get_offsets()[0].tolist() for dot in ax.collections if len(dot.get_facecolor())]
    dots = torch.tensor(places, dtype=torch.float64)
    t = torch.linspace(0, 1, 101, dtype=torch.float64)[:, None]
    for path in lines_of(ax):
        corners = torch.from_numpy(path.vertices)
        start, middle, end = corners[0], corners[1:-1].sum(0), corners[-1]
        way = (1 - t) * start + t * end
        if len(corners) == 3:
            way = (1 - t) ** 2 * start + 2 * t * (1 - t) * middle + t**2 * end
        others = [dot for dot in dots if min((dot - start).norm(), (dot - end).norm()) > 1e-6]
        assert torch.cdist(way, torch.stack(others)).min() > 10.6 / 79


def test_dots_show_values_and_say_their_ranks() -> None:
    _, ax = plt.subplots()
    values = [3.0, 0.5, 0.5, 0.0]
    communication_graph(ax, ring_mixing(4).tolist(), values=values)
    texts = [text.get_text() for text in ax.texts if not isinstance(text, Annotation)]
    assert texts == ["3.00", "rank 0", "0.50", "1", "0.50", "2", "0.00", "3"]
    dots = [each for each in ax.collections if each.get_gid()]
    assert [each.get_gid() for each in dots] == [
        f"tip: rank {rank} holds {value:.4f}" for rank, value in enumerate(values)
    ]
    bright = [sum(to_rgb(each.get_facecolor()[0])) for each in dots]
    assert bright[0] < bright[1] == bright[2] < bright[3]


def lines_of(ax: plt.Axes) -> list[Path]:
    (grey,) = (
        each
        for each in ax.collections
        if isinstance(each, PathCollection) and not len(each.get_facecolor())
    )
    return grey.get_paths()
