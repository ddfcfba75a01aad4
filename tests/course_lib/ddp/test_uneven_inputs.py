"""Ranks with different numbers of batches, against PyTorch's `join` and against one machine."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from course_lib.ddp import DistributedDataParallel
from course_lib.ranks import DeadlockError, MismatchError
from course_lib.sharding import shard
from tests.helpers.ddp_scenarios import SMALL_CAP, batches, mlp, own_shards, sgd, state_of

ignore_torch_warnings = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def train_uneven(ddp: type, counts: list[int]) -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    wrapped = ddp(net, bucket_cap_mb=SMALL_CAP)
    optimizer = sgd(net)
    with wrapped.join():
        for x, y in own_shards(steps=9)[: counts[dist.get_rank()]]:
            optimizer.zero_grad()
            mse_loss(wrapped(x), y).backward()
            optimizer.step()
    net.zero_grad()
    after = wrapped(own_shards()[0][0])  # and then it goes on as before
    after.sum().backward()
    return [*state_of(net), net[0].weight.grad.clone()]


COUNTS = [
    ("cpu", [1, 4]),
    ("cpu", [4, 2, 3]),
    ("simulated", [5, 0, 3, 5]),
    ("simulated", [0, 2]),
    ("simulated", [2, 2]),
    ("simulated", [3]),
]


@ignore_torch_warnings
@pytest.mark.parametrize(("on", "counts"), COUNTS)
def test_ranks_with_different_numbers_of_batches(ranks_of, on, counts):
    ranks = ranks_of(on, len(counts))
    ours = ranks.run(train_uneven, DistributedDataParallel, counts)
    theirs = ranks_of("cpu", len(counts)).run(train_uneven, TorchDDP, counts)
    for replica, other in zip(ours, theirs, strict=True):
        for number, (tensor, expected) in enumerate(zip(replica, other, strict=True)):
            torch.testing.assert_close(tensor, expected, rtol=1e-11, atol=1e-12)
            is_buffer = 6 <= number < len(replica) - 1  # each rank's own, after its last forward
            assert is_buffer or torch.equal(tensor, ours[0][number])


def train_uneven_mlp(by_initial: bool, counts: list[int], micro: int) -> list[Tensor]:
    """With `micro` backwards per step, all but the last in no_sync."""
    net = mlp(seed=dist.get_rank())
    wrapped = DistributedDataParallel(net, SMALL_CAP, find_unused_parameters=micro == 2)
    optimizer = sgd(net)
    with wrapped.join(divide_by_initial_world_size=by_initial):
        for x, y in own_shards(steps=9)[: counts[dist.get_rank()]]:
            optimizer.zero_grad()
            with wrapped.no_sync():
                for _ in range(micro - 1):
                    (mse_loss(wrapped(x), y) / micro).backward()
            (mse_loss(wrapped(x), y) / micro).backward()
            optimizer.step()
    return state_of(net)


@pytest.mark.parametrize("by_initial", [True, False])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize(("on", "counts"), COUNTS)
def test_the_mean_over_the_ranks_that_still_have_batches(ranks_of, on, counts, by_initial, micro):
    k = len(counts)
    net = mlp(seed=0)
    optimizer = sgd(net)
    for step, (x, y) in enumerate(batches(steps=9)[: max(counts)]):
        optimizer.zero_grad()
        active = [r for r in range(k) if counts[r] > step]
        total = sum(mse_loss(net(shard(x, k, r)), shard(y, k, r)) for r in active)
        (total / (k if by_initial else len(active))).backward()
        optimizer.step()
    replicas = ranks_of(on, k).run(train_uneven_mlp, by_initial, counts, micro)
    for replica in replicas:
        for tensor, first, expected in zip(replica, replicas[0], state_of(net), strict=True):
            assert torch.equal(tensor, first)
            torch.testing.assert_close(tensor, expected, rtol=1e-11, atol=1e-12)


def other_communication(own_group: bool) -> None:
    """Reduce a metric inside the block, which ranks that have left it do not."""
    group = dist.new_group() if own_group else None
    wrapped = DistributedDataParallel(nn.Linear(6, 3))
    with wrapped.join():
        for _ in range(1 + dist.get_rank()):
            loss = wrapped(torch.ones(2, 6)).sum()
            loss.backward()
            wrapped.finish_gradient_synchronization()
            dist.all_reduce(loss.detach(), group=group)


@pytest.mark.parametrize("on", ["cpu", "simulated"])
@pytest.mark.parametrize(("own_group", "error"), [(True, DeadlockError), (False, MismatchError)])
def test_a_report_says_why_other_communication_hangs_in_a_join(ranks_of, on, own_group, error):
    with pytest.raises(error, match=r"`with model\.join\(\):` repeats only what DDP itself"):
        ranks_of(on, 3).run(other_communication, own_group)
