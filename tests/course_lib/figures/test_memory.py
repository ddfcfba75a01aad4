"""The memory of a step, kind by kind, against sizes that can be counted by hand."""

from itertools import count

import pytest
import torch
from torch import nn

from course_lib.figures import MemoryOverTime, memory_over_time
from course_lib.fully_sharded import FullyShardedDataParallel
from course_lib.ranks import Device, Network, Ranks, clock
from course_lib.rematerialize import rematerialize

ROWS, WIDTH, LAYERS = 8, 16, 8
WEIGHT, ACTIVATION = 4 * WIDTH**2, 4 * ROWS * WIDTH


def layers() -> nn.Sequential:
    pairs = [(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*(module for pair in pairs for module in pair))


class Forgetful(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return rematerialize(self.layer, x)


def forgetful_layers() -> nn.Sequential:
    *layers_again, last, tanh = layers()
    return nn.Sequential(*map(Forgetful, layers_again), last, tanh)


def moments_of(model, now):
    """Return the second step's moments: then Adam has a state."""
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        with MemoryOverTime(now, optimizer) as memory:
            optimizer.zero_grad()
            model(torch.ones(ROWS, WIDTH)).sum().backward()
            optimizer.step()
    return memory.moments


def test_each_kind_has_the_bytes_that_can_be_counted():
    ticks = count()
    moments = moments_of(layers(), lambda: next(ticks) / 1e3)
    assert [moment.ms for moment in moments] == pytest.approx(range(1, len(moments) + 1))
    first, last = moments[0].held, moments[-1].held
    scalars = 4 * LAYERS  # Adam counts its steps
    for held in (first, last):
        assert held["weights"] == LAYERS * WEIGHT
        assert held["optimizer's state"] == 2 * LAYERS * WEIGHT + scalars
        assert held["gathered weights"] == 0
    assert (first["gradients"], last["gradients"]) == (0, LAYERS * WEIGHT)
    assert first["activations"] == 0
    assert max(moment.held["activations"] for moment in moments) == (LAYERS + 1) * ACTIVATION


@pytest.mark.parametrize("make", [layers, forgetful_layers])
def test_zero_3_gathers_two_layers_and_frees_gradients_that_were_sent(make):
    device, network = Device(flops=1e6), Network(latency=0.0, bandwidth=1e9)  # messages are fast
    with Ranks(2, on="simulated", device=device, network=network) as ranks:
        moments = ranks.run(lambda: moments_of(FullyShardedDataParallel(make()), clock))[0]
    assert max(moment.held["gathered weights"] for moment in moments) == 2 * WEIGHT
    pieces = LAYERS * WEIGHT // 2
    assert pieces < max(moment.held["gradients"] for moment in moments) <= pieces + 3 * WEIGHT
    assert moments[-1].held["gradients"] == pieces


@pytest.mark.usefixtures("fresh_matplotlib")
def test_the_figure_has_a_panel_for_each_run_on_one_scale():
    moments = moments_of(layers(), lambda: 0.0)
    figure = memory_over_time({"one": moments, "two": moments[:3]})
    above, below = figure.axes
    assert above.get_ylim() == below.get_ylim()
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["one", "two"]
