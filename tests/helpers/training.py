"""A few steps of training with different data on every rank, for models of 8 inputs."""

import torch
import torch.distributed as dist
from torch import nn


def train(net: nn.Module, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(5, 8, generator=generator)).square().mean().backward()
        optimizer.step()
