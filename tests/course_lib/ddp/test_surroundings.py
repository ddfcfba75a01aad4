"""A wrapped model in real programs: checkpointing, odd orders, memory formats.

As in `test_wrapper`, PyTorch's class is the oracle, on the same ranks with different data on each.
"""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.helpers import ddp_scenarios as scenarios

ignore_torch_warnings = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


# --- checkpointing, and forwards and backwards in other orders ------------------------------------


class Checkpointed(nn.Module):
    """Three layers, each computed anew in backward; the last one too, or not."""

    def __init__(self, reentrant: bool, head: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double() for _ in range(3)
        )
        self.head = nn.Linear(6, 3).double() if head else nn.Identity()
        self.reentrant = reentrant

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return {"a nested": [self.head(x)]}


def train_checkpointed(ddp: type, reentrant: bool, head: bool, static: bool):
    net = Checkpointed(reentrant, head)
    wrapped = ddp(net, bucket_cap_mb=scenarios.SMALL_CAP, static_graph=static)
    optimizer = scenarios.sgd(net)
    for step in range(3):
        optimizer.zero_grad()
        wrapped(scenarios.random(4, 6, seed=step).requires_grad_())["a nested"][
            0
        ].square().sum().backward()
        optimizer.step()
    return scenarios.state_of(net)


@ignore_torch_warnings
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize(("on", "k"), scenarios.FEW)
def test_activation_checkpointing(ranks_of, on, k, reentrant, head):
    """With a static graph PyTorch waits for a future in C++, where simulated ranks must turn."""
    for static in (False, True):
        scenarios.compare(ranks_of(on, k), train_checkpointed, reentrant, head, static)


def two_forwards(ddp: type, between: str):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    wrapped = ddp(net, bucket_cap_mb=scenarios.SMALL_CAP)
    losses = []
    for step in range(3):
        net.zero_grad()
        loss = wrapped(scenarios.random(4, 6, seed=step)).pow(3).sum()
        if between == "another of the same step":
            loss = loss + wrapped(scenarios.random(4, 6, seed=9)).pow(2).sum()
        elif between == "without gradients":
            with torch.no_grad():
                wrapped(scenarios.random(4, 6, seed=9))
        elif between == "in no_sync":
            with wrapped.no_sync():
                wrapped(scenarios.random(4, 6, seed=9))
        loss.backward()
        losses += scenarios.gradients(net)
    return losses


@pytest.mark.parametrize(
    "between", ["another of the same step", "without gradients", "in no_sync", "nothing"]
)
@pytest.mark.parametrize(("on", "k"), scenarios.FEW)
def test_a_forward_between_forward_and_backward(ranks_of, on, k, between):
    scenarios.compare(ranks_of(on, k), two_forwards, between)


# --- memory formats -------------------------------------------------------------------------------


def train_channels_last(wrap):
    """With an optimizer in one kernel, which goes through gradients as they lie in memory."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 5)).double()
    net = net.to(memory_format=torch.channels_last)
    net[2].weight = nn.Parameter(torch.randn(288, 5, dtype=torch.float64).T)
    wrapped = wrap(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    for step in range(4):
        optimizer.zero_grad()
        wrapped(scenarios.random(2, 3, 8, 8, seed=step)).square().sum().backward()
        optimizer.step()
    return scenarios.state_of(net)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_gradients_lie_as_their_parameters_do(ranks_of, k):
    scenarios.compare(ranks_of("cpu", k), train_channels_last)
