"""ZeRO-1 in one page: the weights of one process whose optimizer got the mean gradient."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.sharded_optimizer import sharded_optimizer
from tests.helpers.ddp_scenarios import WORLDS
from tests.helpers.zero_scenarios import OPTIMIZERS, assert_equal

STEPS, FROZEN, UNUSED = 3, 1, 4
SHAPES = ((3, 2), (4,), (), (0,), (2, 2))


def draw(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(w, i != FROZEN) for i, w in enumerate(draw(0))]


def train(name: str) -> list[Tensor]:
    """Train in a group of all ranks but the last one, which is alone in another."""
    k, rank, params = dist.get_world_size(), dist.get_rank(), parameters()
    groups = [dist.new_group(members) for members in ([*range(k - 1)] or [0], [k - 1])]
    cls, options = OPTIMIZERS[name]
    tied = (param for param in [*params, params[2], params[0]])
    memory = [param.data_ptr() for param in params]
    step = sharded_optimizer(tied, lambda chunk: cls(chunk, **options), groups[rank == k - 1 > 0])
    for number in range(STEPS):
        for i, gradient in enumerate(draw(1 + STEPS * rank + number)):
            unused = i == UNUSED and rank == number  # on one rank at a time
            params[i].grad = None if i == FROZEN or unused else gradient
        step()
    assert [param.data_ptr() for param in params] == memory
    return [param.detach() for param in params]


def one_process(name: str, ranks: list[int]) -> list[Tensor]:
    cls, options = OPTIMIZERS[name]
    params = parameters()
    optimizer = cls([p for i, p in enumerate(params) if i != FROZEN], **options)
    for number in range(STEPS):
        drawn = [draw(1 + STEPS * rank + number) for rank in ranks]
        for rank, gradients in zip(ranks, drawn, strict=True):
            gradients[UNUSED] *= rank != number
        for param, gradients in zip(params, zip(*drawn, strict=True), strict=True):
            param.grad = torch.stack(gradients).mean(0)
        optimizer.step()
    return [param.detach() for param in params]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("on", "k"), WORLDS)
def test_weights_equal_those_of_one_process(ranks_of, on, k, name):
    for rank, weights in enumerate(ranks_of(on, k).run(train, name)):
        members = [rank] if rank == k - 1 else [*range(k - 1)]
        assert_equal(weights, one_process(name, members))
