"""Where PyTorch waits for a future in C++, the other ranks get their turn all the same."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from course_lib.ranks.ranks import Ranks

STATIC = {"static_graph": True}


class Checkpointed(torch.nn.Module):
    def __init__(self, parts: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
        self.parts = parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=True) if i < self.parts else layer(x)
        return x


def train(parts: int, steps: int, bucket_cap_mb: float, **options) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model = Checkpointed(parts)
    wrapped = DDP(model, bucket_cap_mb=bucket_cap_mb, **options) if dist.is_initialized() else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 12 * 8).reshape(12, 8)
    rank, k = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    shard = x[rank * (12 // k) : (rank + 1) * (12 // k)].requires_grad_()
    for _ in range(steps):
        optimizer.zero_grad()
        wrapped(shard).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    "k", [pytest.param(k, marks=[pytest.mark.large] * (k != 3)) for k in (1, 2, 3, 4)]
)
@pytest.mark.parametrize("bucket_cap_mb", [25.0, 1e-4])
@pytest.mark.parametrize(
    ("checkpoints", "options"),
    [(0, STATIC), (4, STATIC), (2, STATIC), (2, {})],
    ids=["static graph", "static, checkpoints", "static, some checkpoints", "some checkpoints"],
)
def test_ddp_equals_one_process(k, bucket_cap_mb, checkpoints, options):
    expected = train(checkpoints, 3, bucket_cap_mb)
    ranks = Ranks(k, on="simulated", timeout=60)
    for weights in ranks.run(train, checkpoints, 3, bucket_cap_mb, **options):
        torch.testing.assert_close(weights, expected)


def all_of(futures):
    return torch.futures.wait_all(futures)


def collected(futures):
    return [future.value() for future in torch.futures.collect_all(futures).wait()]


def chained(futures):
    return [future.then(lambda f: f.value()).wait() for future in futures]


@pytest.mark.parametrize("wait", [all_of, collected, chained])
def test_futures_waited_for_together(wait) -> None:
    def fn() -> list[float]:
        x = [torch.full((2,), i + 1.0 + dist.get_rank()) for i in range(3)]
        futures = [dist.all_reduce(tensor, async_op=True).get_future() for tensor in x]
        wait(futures)
        return [tensor[0].item() for tensor in x]

    assert Ranks(3, on="simulated", timeout=60).run(fn) == [[6.0, 9.0, 12.0]] * 3
