"""Models for tests of sharded states: hard to cut, with one process to compare."""

import torch
from torch import nn

from course_lib.gradient_sync import sync_flat
from tests.helpers.ddp_scenarios import batches, own

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "adamw, fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "plain": (torch.optim.SGD, {"lr": 0.2}),
}


class Awkward(nn.Module):
    """Tied and frozen weights, sizes that nothing divides, one of a single number, one turned."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.enter = nn.Linear(6, 7)
        self.body = nn.Linear(7, 7, bias=False)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.again = nn.Linear(7, 7)
        self.again.weight = self.body.weight
        self.turned = nn.Parameter(torch.randn(3, 7).t())
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.to(dtype)

    def forward(self, x):
        x = torch.tanh(self.enter(x))
        x = torch.tanh(self.body(x) + self.frozen(x))
        return (torch.tanh(self.again(x)) @ self.turned) * self.scale


def groups_of(net: nn.Module, groups: bool):
    params = list(net.parameters())
    if not groups:
        return params
    return [{"params": params[:2], "lr": 0.05}, {"params": params[2:], "weight_decay": 0.1}]


def one_process(name: str, groups: bool = False, make=Awkward):
    """Return the model and optimizer after all steps with whole batches."""
    net = make()
    cls, options = OPTIMIZERS[name]
    optimizer = cls(groups_of(net, groups), **options)
    dtype = next(net.parameters()).dtype
    for x, y in batches(dtype=dtype):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    return net, optimizer


def weights(net: nn.Module):
    return [param.detach().clone() for param in net.parameters()]


def run_steps(net: nn.Module, optimizer, data, average: bool = False) -> None:
    for batch in data:
        optimizer.zero_grad()
        x, y = own(batch)
        nn.functional.mse_loss(net(x), y).backward()
        if average:
            sync_flat(net.parameters())
        optimizer.step()


def assert_equal(tensors, expected) -> None:
    torch.testing.assert_close(tensors, expected, rtol=1e-10, atol=1e-12)
