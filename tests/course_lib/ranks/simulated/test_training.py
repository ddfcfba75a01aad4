"""PyTorch's own data parallelism runs on simulated ranks, and takes the time it must take."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course_lib.ranks.costs.computation import clock
from course_lib.ranks.costs.network import Device, Network
from course_lib.ranks.ranks import Ranks
from tests.helpers.ddp_scenarios import SMALL_CAP, mlp, steps


def power_sgd() -> list[torch.Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    net = mlp()
    wrapped = DistributedDataParallel(net, bucket_cap_mb=SMALL_CAP)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return steps(wrapped, net)


def test_hooks_that_launch_more_from_their_callbacks() -> None:
    replicas = Ranks(3, on="simulated").run(power_sgd)
    torch.testing.assert_close(replicas, [replicas[0]] * 3, rtol=0, atol=0)


WIDTH, LAYERS, BATCH = 32, 4, 5


def one_step() -> tuple[float, float]:
    net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    x = torch.randn(BATCH, WIDTH)
    ddp = DistributedDataParallel(net, bucket_cap_mb=1e-6)
    ddp(x).sum().backward()  # after the first step DDP builds its buckets anew
    ddp(x).sum().backward()
    dist.barrier()
    start = clock()
    ddp(x).sum().backward()
    return start, clock()


@pytest.mark.parametrize("bandwidth", [1e6, 1e9])
@pytest.mark.parametrize("k", [2, 4])
def test_ddp_overlaps_each_bucket_with_the_rest_of_backward(k: int, bandwidth: float) -> None:
    flops, alpha = 1e7, 1e-5
    network, device = Network(alpha, bandwidth), Device(flops=flops)
    matmul = 2 * BATCH * WIDTH * WIDTH / flops
    all_reduce = 2 * (k - 1) * (alpha + 4 * WIDTH * WIDTH / k / bandwidth)
    now, link = LAYERS * matmul, 0.0
    for layer in reversed(range(LAYERS)):
        now += matmul * (2 if layer else 1)  # the first layer's input needs no gradient
        link = max(link, now) + all_reduce
    ranks = Ranks(k, on="simulated", network=network, device=device)
    for start, end in ranks.run(one_step):
        assert end - start == pytest.approx(link, rel=1e-9)
