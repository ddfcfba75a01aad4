"""Complex parameters: clipped by their real norm, as in one process."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.ddp import DistributedDataParallel
from course_lib.sharded_optimizer import ShardedOptimizer


class Waves(nn.Module):
    """A complex weight, and a real one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.turn = nn.Parameter(torch.randn(3, 5, dtype=torch.complex128))
        self.shift = nn.Parameter(torch.randn(5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.turn.dtype) @ self.turn).abs().square().mean() + self.shift.sum()


def rows(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(4, 3, generator=generator, dtype=torch.float64)


def clipped(how: str) -> tuple[Tensor, list[Tensor]]:
    model = Waves()
    wrapped = DistributedDataParallel(model) if how in ("ddp", "averaged") else model
    if how == "ddp":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, gradients=how, lr=0.1)
    wrapped(rows(dist.get_rank())).backward()
    if how == "ddp":
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    else:
        norm = optimizer.clip_grad_norm_(0.5)
    optimizer.step()
    return norm, [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("how", ["ddp", "averaged", "local", "sharded"])
def test_complex_gradients_are_clipped_as_in_one_process(ranks_of, how):
    alone = Waves()
    (sum(alone(rows(rank)) for rank in range(3)) / 3).backward()
    norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    expected = [param.detach() for param in alone.parameters()]
    for replica in ranks_of("simulated", 3).run(clipped, how):
        torch.testing.assert_close(replica, (norm, expected))
