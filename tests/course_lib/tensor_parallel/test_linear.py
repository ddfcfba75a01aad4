"""A linear layer that is cut between ranks: the outputs and gradients of `nn.Linear`."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.tensor_parallel import column_parallel, row_parallel
from tests.helpers.ddp_scenarios import WORLDS

IN, OUT = 5, 3  # fewer outputs than ranks, where there are four
MAKE = {0: column_parallel, 1: row_parallel}


def layer(bias: bool) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(IN, OUT, bias, dtype=torch.float64)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def gradients(linear: nn.Module, x: Tensor, y: Tensor, dy: Tensor) -> list[Tensor]:
    """Return the gradients of a model in which x is also used beside the layer."""
    bias = [] if linear.bias is None else [linear.bias]
    loss = (y * dy).sum() + x.square().sum()
    return list(torch.autograd.grad(loss, [x, linear.weight, *bias]))


def one_process(bias: bool) -> tuple[Tensor, list[Tensor]]:
    linear, x = layer(bias), numbers(2, 4, IN).requires_grad_()
    y = linear(x)
    return y, gradients(linear, x, y, numbers(2, 4, OUT))


def on_ranks(dim: int, bias: bool) -> tuple[Tensor, list[Tensor]]:
    rank, k, linear = dist.get_rank(), dist.get_world_size(), layer(bias)
    part = MAKE[dim](linear)
    assert part.weight.untyped_storage().data_ptr() != linear.weight.untyped_storage().data_ptr()
    x, dy = numbers(2, 4, IN), numbers(2, 4, OUT)
    if dim == 0:
        dy = dy.tensor_split(k, -1)[rank]
    else:
        x = x.tensor_split(k, -1)[rank]
    x = x.clone().requires_grad_()
    y = part(x)
    return y.detach(), gradients(part, x, y, dy)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dim", MAKE)
@pytest.mark.parametrize(("on", "k"), WORLDS)
def test_its_parts_are_those_of_one_process(ranks_of, on, k, dim, bias):
    output, (dx, dw, *db) = one_process(bias)
    for rank, results in enumerate(ranks_of(on, k).run(on_ranks, dim, bias)):

        def own(tensor: Tensor, along: int, rank: int = rank) -> Tensor:
            return tensor.tensor_split(k, along)[rank]

        if dim == 0:
            right = own(output, -1), [dx, own(dw, 0), *(own(gradient, 0) for gradient in db)]
        else:
            right = output, [own(dx, -1), own(dw, 1), *db]
        torch.testing.assert_close(results, right)
