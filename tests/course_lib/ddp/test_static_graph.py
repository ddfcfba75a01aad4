"""`static_graph=True`: the first backward is counted, the later ones are like it.

Against PyTorch's `static_graph` and against one machine, with different data on every rank.
"""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.ddp import DistributedDataParallel
from course_lib.ranks import RankError
from tests.helpers.ddp_scenarios import BOTH, FEW, SMALL_CAP, gradients, random, sgd, state_of


class Branches(nn.Module):
    """One layer in use everywhere, one on ranks above 0, one nowhere."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.by_some, self.by_none = (nn.Linear(6, 6).double() for _ in range(3))

    def forward(self, x: Tensor, other: bool = False) -> Tensor:
        x = self.used(x)
        if dist.get_rank() > 0 or other:
            x = self.by_some(x.tanh())
        return self.by_none(x) if other else x


def train_branches(ddp: type, counts: list[int] | None = None) -> list[Tensor]:
    net = Branches()
    wrapped = ddp(net, bucket_cap_mb=SMALL_CAP, static_graph=True)
    optimizer = sgd(net)
    seen = []
    for step in range(counts[dist.get_rank()] if counts else 4):
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


def changed(more: bool) -> None:
    wrapped = DistributedDataParallel(Branches(), static_graph=True)
    for other in (not more, more):
        wrapped(random(4, 6), other).sum().backward()


@pytest.mark.parametrize(
    ("more", "message"),
    [(True, "'by_none.* more often than in the first step"), (False, "'by_.* less often")],
)
def test_a_graph_that_changes_is_an_error(ranks_of, more, message):
    with pytest.raises(RankError, match=message) as error:
        ranks_of("simulated", 2).run(changed, more)
    assert "Your training graph has changed in this iteration" in str(error.value)
