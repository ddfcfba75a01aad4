"""A graph has a line for each pair in which one hears the other, and arrows to rank 0 only."""

import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.collections import PathCollection
from matplotlib.path import Path
from matplotlib.text import Annotation

from course_lib.decentralized import (
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


def lines_of(ax: plt.Axes) -> list[Path]:
    (grey,) = (
        each
        for each in ax.collections
        if isinstance(each, PathCollection) and not len(each.get_facecolor())
    )
    return grey.get_paths()
