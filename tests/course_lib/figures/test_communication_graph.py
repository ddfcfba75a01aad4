"""A graph has a line for each pair in which one hears the other, and arrows to rank 0 only."""

import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.text import Annotation

from course_lib.decentralized import exponential_mixing, ring_mixing, torus_mixing
from course_lib.figures import communication_graph

pytestmark = pytest.mark.usefixtures("fresh_matplotlib")


@pytest.mark.parametrize("columns", [0, 4])
@pytest.mark.parametrize("mixing", [ring_mixing(16), exponential_mixing(16), torus_mixing(4, 4)])
def test_whom_rank_0_hears_has_an_arrow_and_everybody_a_number(mixing, columns):
    _, ax = plt.subplots()
    communication_graph(ax, mixing.tolist(), columns=columns)
    lines = [text for text in ax.texts if isinstance(text, Annotation)]
    numbers = {text.get_position(): int(text.get_text()) for text in ax.texts if text not in lines}
    heard = torch.zeros(16, 16, dtype=torch.bool)
    for line in lines:
        heard[numbers[line.xy], numbers[line.xyann]] = True
    assert torch.equal(heard, (mixing > 0) & ~torch.eye(16, dtype=torch.bool))
    arrows = [line for line in lines if line.arrowprops["arrowstyle"] == "-|>"]
    assert {numbers[line.xy] for line in arrows} == {0}
    assert {numbers[line.xyann] for line in arrows} == set(heard[0].nonzero().flatten().tolist())
    assert sorted(numbers.values()) == list(range(16))
