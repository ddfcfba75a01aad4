"""`static_graph=True`: unused parameters as with PyTorch's, with different data on every rank."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.ddp import DistributedDataParallel
from tests.helpers.ddp_scenarios import BOTH, FEW, SMALL_CAP, gradients, random, sgd, state_of


class Branches(nn.Module):
    """One layer in use everywhere, one on ranks above 0, one nowhere."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.by_some, self.by_none = (nn.Linear(6, 6).double() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.used(x)
        return self.by_some(x.tanh()) if dist.get_rank() > 0 else x


def train_branches(ddp: type) -> list[Tensor]:
    net = Branches()
    wrapped = ddp(net, bucket_cap_mb=SMALL_CAP, static_graph=True)
    optimizer = sgd(net)
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        wrapped(random(4, 6, seed=step)).square().sum().backward()
        seen += gradients(net)
        optimizer.step()
    return [*seen, *state_of(net)]


@pytest.mark.parametrize(("on", "k"), FEW)
def test_unused_parameters_as_with_pytorch(ranks_of, on, k):
    ours = ranks_of(on, k).run(train_branches, DistributedDataParallel)
    theirs = ranks_of("cpu", k).run(train_branches, BOTH[1])
    for replica, other in zip(ours, theirs, strict=True):
        for tensor, expected in zip(replica, other, strict=True):
            torch.testing.assert_close(tensor, expected, rtol=1e-11, atol=1e-12)
