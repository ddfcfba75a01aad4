"""Buffers are the first rank's, as with PyTorch's class, and are sent only when they changed."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from course_lib.ddp import DistributedDataParallel
from tests.helpers.ddp_scenarios import BOTH, FEW, own_shards, sgd, state_of

ignore_torch_warnings = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def train_batch_norm(ddp: type, broadcast_buffers: bool) -> list[Tensor]:
    torch.manual_seed(dist.get_rank())
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    if broadcast_buffers:  # without, PyTorch's are not even equal at the start; ours always are
        net[1].running_mean.fill_(dist.get_rank())
    wrapped = ddp(net, broadcast_buffers=broadcast_buffers)
    optimizer = sgd(net)
    outputs = []
    for step, (x, y) in enumerate(own_shards()):
        optimizer.zero_grad()
        mse_loss(wrapped(x), y).backward()
        optimizer.step()
        if step == 2:
            wrapped.eval()
            with torch.no_grad():
                outputs.append(wrapped(torch.ones(2, 6).double()))
                outputs.append(wrapped(x.sum() * torch.ones(2, 6).double()))
            wrapped.train()
    return [*outputs, *state_of(net)]


@ignore_torch_warnings
@pytest.mark.parametrize("broadcast_buffers", [True, False])
@pytest.mark.parametrize(("on", "k"), FEW)
def test_buffers_are_the_first_rank_s(ranks_of, on, k, broadcast_buffers):
    ours, torch_replicas = (
        ranks_of(on, k).run(train_batch_norm, ddp, broadcast_buffers) for ddp in BOTH
    )
    for replica, other in zip(ours, torch_replicas, strict=True):
        for tensor, expected in zip(replica, other, strict=True):
            torch.testing.assert_close(tensor, expected, rtol=1e-11, atol=1e-12)
    after_a_broadcast = [replica[0] for replica in ours]
    same = all(torch.equal(output, after_a_broadcast[0]) for output in after_a_broadcast)
    assert same == broadcast_buffers


def evaluate() -> None:
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))
    wrapped = DistributedDataParallel(net)
    wrapped(torch.randn(4, 6))
    with torch.no_grad():
        for _ in range(5):
            wrapped(torch.randn(4, 6))


def test_buffers_are_not_sent_when_nothing_changed_them(ranks_of):
    ranks = ranks_of("simulated", 2)
    ranks.run(evaluate)
    # For each dtype: at the start, before the first forward, before the first without gradients.
    assert ranks.trace.calls(1)["broadcast"] == 3 * 2
