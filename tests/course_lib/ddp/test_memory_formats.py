"""Gradients lie in memory as their parameters do, whatever the format."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.ddp_scenarios import compare, random, state_of


def train_channels_last(wrap: Callable[[nn.Module], nn.Module]) -> list[Tensor]:
    """With an optimizer in one kernel, which goes through gradients as they lie in memory."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 5)).double()
    net = net.to(memory_format=torch.channels_last)
    net[2].weight = nn.Parameter(torch.randn(288, 5, dtype=torch.float64).T)
    wrapped = wrap(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    for step in range(4):
        optimizer.zero_grad()
        wrapped(random(2, 3, 8, 8, seed=step)).square().sum().backward()
        optimizer.step()
    return state_of(net)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_gradients_lie_as_their_parameters_do(ranks_of, k):
    compare(ranks_of("cpu", k), train_channels_last)
