"""Backward in two halves gives the gradients of backward in one."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from course_lib.pipeline_parallel.weight_gradients import LaterWeightGradients


def compare(net: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """Return what the first half gave; raise AssertionError if both together are not right."""
    x.requires_grad_()
    net(x).square().sum().backward()
    expected = [x.grad, *(param.grad for param in net.parameters())]
    x.grad = None
    net.zero_grad()
    later = LaterWeightGradients()
    with later:
        y = net(x)
    y.square().sum().backward()
    torch.testing.assert_close(x.grad, expected[0])
    first = {name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()}
    later.compute()
    for param, gradient in zip(net.parameters(), expected[1:], strict=True):
        assert (param.grad is None) == (gradient is None)
        if gradient is not None:
            torch.testing.assert_close(param.grad, gradient)
    return first


def test_tied_frozen_and_computed_weights():
    torch.manual_seed(0)
    a, b, c, d = (nn.Linear(5, 5) for _ in range(4))
    b.weight = a.weight
    c.weight.requires_grad_(False)
    d.bias.requires_grad_(False)
    normed = parametrizations.weight_norm(nn.Linear(5, 5))
    first = compare(nn.Sequential(a, b, nn.Tanh(), c, d, normed), torch.randn(4, 5))
    assert first["0.weight"] is None
    assert first["5.parametrizations.weight.original0"] is not None  # behind it is more to do


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(("inputs", "outputs"), [(5, 0), (0, 5)])
def test_a_share_without_columns(inputs, outputs):
    """With more ranks than columns or rows of a weight, some rank has none."""
    compare(nn.Linear(inputs, outputs, bias=outputs > 0), torch.randn(2, 3, inputs))
