"""Rematerialisation: the same gradients, from fewer kept activations and one more forward."""

import pytest
import torch
from torch import nn

from course_lib.fully_sharded import FullyShardedDataParallel
from course_lib.rematerialize import most_kept, rematerialize
from course_lib.sharded_optimizer import ShardedOptimizer
from tests.helpers.zero_scenarios import batches, run_steps


class Block(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.4)

    def forward(self, x, scale: float = 1.0):
        return x + scale * self.dropout(self.leave(torch.tanh(self.enter(x))))


class Net(nn.Module):
    def __init__(self, run, dropout: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.ModuleList([Block() for _ in range(3)]), nn.Linear(6, 3)
        self.how = run
        self.double().train(dropout)

    def forward(self, x):
        for block in self.blocks:
            x = self.how(block, x, 0.5)
        return self.head(x)


def plainly(function, *inputs):
    return function(*inputs)


def gradients(run, needs_input: bool):
    net = Net(run)
    torch.manual_seed(7)
    x = torch.randn(5, 6, dtype=torch.float64).requires_grad_(needs_input)
    net(x).square().sum().backward()
    results = [p.grad for p in net.parameters()] + ([x.grad] if needs_input else [])
    return [g for g in results if g is not None] + [torch.rand(2)]  # the random numbers after it


@pytest.mark.parametrize("needs_input", [True, False])
def test_gradients_are_those_without_it(needs_input):
    ours = gradients(rematerialize, needs_input)
    assert len(ours) == 14 + needs_input + 1
    torch.testing.assert_close(ours, gradients(plainly, needs_input), rtol=0, atol=0)


@pytest.mark.parametrize("segment", [1, 2, 3, 6])
def test_inputs_of_segments_and_one_segment_are_kept(segment):
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(6)))
    rows = torch.randn(20, 5)

    def in_segments() -> None:
        x = rows
        for start in range(0, 6, segment):
            x = rematerialize(layers[start : start + segment], x)
        x.sum().backward()

    everything = most_kept(lambda: layers(rows).sum().backward(), layers.parameters())
    assert everything == 7 * rows.nbytes  # the input, and what each layer makes
    inputs_and_one_segment = (6 // segment + segment) * rows.nbytes
    assert most_kept(in_segments, layers.parameters()) == inputs_and_one_segment


def trained(wrapper: str, mode: str):
    net = Net(rematerialize if mode == "again" else plainly, dropout=False)
    wrapped = net
    if wrapper == "fully sharded":
        wrapped = FullyShardedDataParallel(net, unit_types=(Block,))
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    else:
        optimizer = ShardedOptimizer(
            net.parameters(), torch.optim.SGD, lr=0.1, gradients="sharded", bucket_cap_mb=1e-4
        )
    run_steps(wrapped, optimizer, batches())
    state = wrapped.full_state_dict() if wrapper == "fully sharded" else net.state_dict()
    return {name: value.clone() for name, value in state.items()}


@pytest.mark.parametrize("wrapper", ["fully sharded", "sharded gradients"])
@pytest.mark.parametrize("k", [1, 3])
def test_inside_what_shards(ranks_of, k, wrapper):
    expected, rematerialized = (
        ranks_of("simulated", k).run(trained, wrapper, mode) for mode in ("plain", "again")
    )
    torch.testing.assert_close(rematerialized, expected, rtol=1e-11, atol=1e-12)
