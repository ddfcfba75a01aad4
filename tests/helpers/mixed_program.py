"""A program that goes by random numbers, by who comes first and by what is already done."""

import random

import torch
import torch.distributed as dist

from course_lib.ranks.costs.computation import compute


def mixed() -> tuple[torch.Tensor, float]:
    """Do a little of everything, in an order that depends on random numbers."""
    rank, k = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    random.seed(rank)
    pair = dist.new_group([0, k - 1])
    x = torch.rand(50)
    for step in range(4):
        compute(random.random() * 1e-3)
        work = dist.isend(x[step:].clone(), (rank + 1) % k)
        y = torch.empty(50 - step)
        dist.recv(y)  # from whoever comes first
        work.wait()
        handle = dist.all_reduce(y, async_op=True)
        if rank in (0, k - 1):
            dist.all_reduce(x, group=pair)
        while not handle.is_completed():
            compute(1e-5)
        x += y.sum() + torch.rand(50)
    return x, random.random()
