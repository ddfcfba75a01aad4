"""The same run gives the same trace and the same values."""

import random
import subprocess
import sys

import numpy as np
import torch
import torch.distributed as dist

from course_lib.ranks.costs.computation import compute
from course_lib.ranks.costs.network import Device, Network
from course_lib.ranks.ranks import Ranks


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


def test_runs_are_one_also_on_a_busy_machine() -> None:
    def run():
        network, device = Network(1e-4, 1e6), Device(slowdown={1: 1.5, 3: 1.2})
        ranks = Ranks(5, on="simulated", network=network, device=device)
        return [(x.tolist(), number) for x, number in ranks.run(mixed)], ranks.trace.events

    first = run()
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        assert [run() for _ in range(5)] == [first] * 5
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_random_numbers_belong_to_the_rank() -> None:
    def draw() -> list[float]:
        rank = dist.get_rank()
        torch.manual_seed(rank)
        random.seed(rank)
        np.random.seed(rank)
        numbers = []
        for _ in range(3):
            dist.barrier()
            numbers += [torch.rand(1).item(), random.random(), float(np.random.rand())]
        for _ in range(5):  # draws two numbers, and keeps one for the next time
            dist.barrier()
            numbers.append(random.gauss(0, 1))
        return numbers

    together = Ranks(3, on="simulated").run(draw)
    # Alone, rank 0 of one: what rank 0 of three draws.
    assert Ranks(1, on="simulated").run(draw)[0] == together[0]
    assert len({tuple(numbers) for numbers in together}) == 3
