"""Gradients lie in memory as their parameters do, whatever the format."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from course_lib.gradient_sync import sync_bucketed, sync_flat
from tests.helpers.ddp_scenarios import compare, random, state_of


def train_channels_last(wrap: Callable[[nn.Module], nn.Module] | str) -> list[Tensor]:
    """With an optimizer in one kernel, which goes through gradients as they lie in memory."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 5)).double()
    net = net.to(memory_format=torch.channels_last)
    net[2].weight = nn.Parameter(torch.randn(288, 5, dtype=torch.float64).T)
    sync = {"flat": sync_flat, "bucketed": sync_bucketed}.get(wrap) if wrap in SYNCS else None
    wrapped = net if sync else wrap(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    for step in range(4):
        optimizer.zero_grad()
        wrapped(random(2, 3, 8, 8, seed=step)).square().sum().backward()
        if sync:
            sync(net.parameters())
        optimizer.step()
    return state_of(net)


SYNCS = ("flat", "bucketed")


@pytest.mark.parametrize("k", [1, 2, 3])
def test_gradients_lie_as_their_parameters_do(ranks_of, k):
    expected = compare(ranks_of("cpu", k), train_channels_last)
    for sync in SYNCS:
        for replica in ranks_of("cpu", k).run(train_channels_last, sync):
            for tensor, wanted in zip(replica, expected, strict=True):
                torch.testing.assert_close(tensor, wanted, rtol=1e-9, atol=1e-10)
