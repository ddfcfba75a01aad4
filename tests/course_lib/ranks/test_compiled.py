"""``torch.compile`` on ranks. The backend does not matter, so it is one that compiles nothing."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from course_lib import ddp, fully_sharded
from tests.helpers.carriers import ranks_on

pytestmark = pytest.mark.parametrize("carrier", ["simulated", "cpu"])
CELL = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

scale = 2.0

def helper(x):
    return torch.sin(x) * scale

class Layer(nn.Module):
    weight = 1.0
    def forward(self, x):
        return helper(x) * Layer.weight

@torch.compile(backend="eager")
def decorated(x):
    return helper(x) + dist.get_rank()

def run():
    global scale
    Layer.weight = 1.0 + dist.get_rank()
    layers = torch.compile(nn.Sequential(Layer(), Layer()), backend="eager")
    results = [layers(torch.ones(1)).item(), decorated(torch.ones(1)).item()]
    scale = 3.0 + dist.get_rank()
    return [*results, layers(torch.ones(1)).item(), decorated(torch.ones(1)).item()]
"""


def test_a_cell_s_own_functions_classes_and_variables(carrier: str) -> None:
    """The compiled function of PyTorch, `nn.Sequential.forward`, is one for all simulated ranks."""
    for _ in range(2):
        cell = {"__name__": "__main__"}
        exec(CELL, cell)
        for rank, results in enumerate(ranks_on(carrier, 3).run(cell["run"])):
            weight, scale = 1.0 + rank, 3.0 + rank
            first, second = 2 * weight * math.sin(1.0), scale * weight * math.sin(1.0)
            expected = [2 * weight * math.sin(first), 2 * math.sin(1.0) + rank]
            expected += [scale * weight * math.sin(second), scale * math.sin(1.0) + rank]
            assert results == pytest.approx(expected, rel=1e-4)


def plus_rank(x: torch.Tensor) -> torch.Tensor:
    y, rank, size = x * 2, dist.get_rank(), dist.get_world_size()
    right = torch.zeros_like(y)
    messages = [(dist.isend, y, (rank + 1) % size), (dist.irecv, right, (rank - 1) % size)]
    for work in dist.batch_isend_irecv([dist.P2POp(*message) for message in messages]):
        work.wait()
    dist.broadcast(y, 1)
    gathered = torch.zeros(2 * size)
    work = dist.all_gather_into_tensor(gathered, right, async_op=True)
    z = right + rank  # compiled while a handle is open
    work.wait()
    return torch.cat([y, z, gathered]) + len(dist.get_backend())


def test_collectives_in_a_function_of_a_module(carrier: str) -> None:
    def run(compiled: bool) -> torch.Tensor:
        function = torch.compile(plus_rank, backend="eager") if compiled else plus_rank
        return torch.stack([function(torch.arange(2.0) + 10 * dist.get_rank()) for _ in range(2)])

    ranks = ranks_on(carrier, 3)
    assert torch.equal(torch.stack(ranks.run(run, True)), torch.stack(ranks.run(run, False)))


WRAPPERS = [
    nn.parallel.DistributedDataParallel,
    ddp.DistributedDataParallel,
    fully_shard,
    fully_sharded.FullyShardedDataParallel,
]


def losses(wrap) -> list[float]:
    """Train a compiled wrapper on this rank's share of each batch; without one, on all of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    xs, ys = torch.randn(3, 4, 4), torch.randn(3, 4, 1)
    if wrap is not None:
        model = torch.compile(wrap(model), backend="eager")
        share = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
        xs, ys = xs[:, share], ys[:, share]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    means = []
    for x, y in zip(xs, ys, strict=True):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        means.append(mean.item())
    return means


@pytest.mark.every_case
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_compiled_wrappers_train_as_one_process(carrier, wrap):
    ranks = ranks_on(carrier, 2)
    expected = ranks.run(losses, None)[0]
    assert ranks.run(losses, wrap) == [pytest.approx(expected, rel=1e-4)] * 2
