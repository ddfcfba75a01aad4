"""Parameters that a rank does not use in a step: found where that is asked for, an error else."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from course_lib.ddp import DistributedDataParallel
from course_lib.ranks import RankError
from course_lib.sharding import shard
from tests.helpers.ddp_scenarios import (
    FEW,
    SMALL_CAP,
    batches,
    compare,
    mlp,
    own_shards,
    sgd,
    state_of,
)

ignore_torch_warnings = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


class Branches(nn.Module):
    """Runs one of three branches, and never the last one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.branches = nn.ModuleList([nn.Linear(6, 3) for _ in range(4)]).double()
        self.shared = nn.Linear(3, 3).double()

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.shared(self.branches[branch](x))


def train_branches(ddp: type, per_rank: bool, option: str) -> list[Tensor]:
    net = Branches()
    wrapped = ddp(net, bucket_cap_mb=SMALL_CAP / 3, **{option: True})
    optimizer = sgd(net)
    never = net.branches[3].weight.detach().clone()
    for step, (x, y) in enumerate(own_shards()):
        optimizer.zero_grad()
        branch = (step * (option != "static_graph") + per_rank * dist.get_rank()) % 3
        mse_loss(wrapped(x, branch), y).backward()
        optimizer.step()
    # Neither weight decay nor momentum moves what nobody uses: its gradient stays None.
    assert net.branches[3].weight.grad is None
    assert torch.equal(net.branches[3].weight, never)
    return state_of(net)


@ignore_torch_warnings
@pytest.mark.parametrize("per_rank", [False, True])
@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
@pytest.mark.parametrize(("on", "k"), [*FEW, ("cpu", 3)])
def test_branches_that_some_or_no_ranks_use(ranks_of, on, k, per_rank, option):
    """With a static graph a rank uses the same branch in every step."""
    compare(ranks_of(on, k), train_branches, per_rank, option)


def leave_one_out() -> None:
    wrapped = DistributedDataParallel(Branches())
    wrapped(torch.ones(2, 6).double(), 0).sum().backward()


@pytest.mark.parametrize(("on", "k"), FEW)
def test_an_unused_parameter_is_an_error(ranks_of, on, k):
    message = r"rank \d: .* no gradient to 'branches\.1\.weight', 'branches\.1\.bias'"
    with pytest.raises(RankError, match=message):
        ranks_of(on, k).run(leave_one_out)


def nothing_used_on_rank_0() -> tuple[list[Tensor], list[Tensor]]:
    net = mlp(seed=0)
    wrapped = DistributedDataParallel(net, find_unused_parameters=True)
    x, y = own_shards()[0]
    output = wrapped(x)
    if dist.get_rank() > 0:
        mse_loss(output, y).backward()
        wrapped.finish_gradient_synchronization()
    local = [p.grad for p in net.parameters()]
    wrapped.finish_gradient_synchronization()
    wrapped.finish_gradient_synchronization()
    return local, [p.grad for p in net.parameters()]


@pytest.mark.parametrize(("on", "k"), FEW)
def test_a_rank_that_uses_no_parameter_says_so_with_finish(ranks_of, on, k):
    results = ranks_of(on, k).run(nothing_used_on_rank_0)
    assert results[0][0] == [None] * 6
    x, y = batches()[0]
    net = mlp(seed=0)
    loss = sum(mse_loss(net(shard(x, k, r)), shard(y, k, r)) for r in range(1, k)) / k
    loss.backward()
    for _, gradients in results:
        for gradient, param in zip(gradients, net.parameters(), strict=True):
            torch.testing.assert_close(gradient, param.grad, rtol=1e-11, atol=1e-12)
