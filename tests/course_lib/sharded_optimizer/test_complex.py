"""Complex parameters are clipped by their norm, which is real, as in one process."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.ddp import DistributedDataParallel
from course_lib.sharded_optimizer import ShardedOptimizer


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 5, dtype=torch.complex128)


def loss(net: nn.Module, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(4, 3, generator=generator, dtype=torch.complex128)
    return net(x).abs().square().mean()


def clipped(gradients: str) -> tuple[Tensor, Tensor]:
    net = model()
    optimizer = ShardedOptimizer(net.parameters(), torch.optim.SGD, gradients=gradients, lr=0.1)
    wrapped = DistributedDataParallel(net) if gradients == "averaged" else net
    loss(wrapped, dist.get_rank()).backward()
    norm = optimizer.clip_grad_norm_(0.1)
    optimizer.step()
    return norm, net.weight.detach()


@pytest.mark.parametrize("gradients", ["averaged", "local", "sharded"])
def test_complex_gradients_are_clipped_as_in_one_process(ranks_of, gradients):
    net = model()
    (sum(loss(net, rank) for rank in range(3)) / 3).backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    for replica in ranks_of("simulated", 3).run(clipped, gradients):
        torch.testing.assert_close(replica, (norm, net.weight.detach()))
