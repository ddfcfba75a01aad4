"""A few steps of training with different data on every rank, for models of 8 inputs."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(net: nn.Module, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(5, 8, generator=generator)).square().mean().backward()
        optimizer.step()


def model(width: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, width), nn.ReLU(), nn.BatchNorm1d(width), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, 4),
    )  # fmt: skip


def weights(net: nn.Module) -> torch.Tensor:
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
    return torch.cat([p.detach().flatten() for p in full])


def average_hook(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda f: f.value()[0] / dist.get_world_size())


def train_ddp(hook: bool, unused: bool) -> torch.Tensor:
    net = DistributedDataParallel(model(), bucket_cap_mb=0.0005, find_unused_parameters=unused)
    if hook:
        net.register_comm_hook(None, average_hook)
    train(net)
    return weights(net)
