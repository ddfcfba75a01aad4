"""Ranks with different numbers of batches, against PyTorch's `join`."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from course_lib.ddp import DistributedDataParallel
from course_lib.ranks import DeadlockError, MismatchError
from tests.helpers.ddp_scenarios import BOTH, SMALL_CAP, own_shards, sgd, state_of

ignore_torch_warnings = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def train_uneven(ddp: type, counts: list[int], by_initial: bool, micro: int) -> list[Tensor]:
    """With `micro` backwards per step, all but the last in no_sync."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    wrapped = ddp(net, bucket_cap_mb=SMALL_CAP)
    optimizer = sgd(net)
    with wrapped.join(divide_by_initial_world_size=by_initial):
        for x, y in own_shards(steps=9)[: counts[dist.get_rank()]]:
            optimizer.zero_grad()
            with wrapped.no_sync():
                for _ in range(micro - 1):
                    (mse_loss(wrapped(x), y) / micro).backward()
            (mse_loss(wrapped(x), y) / micro).backward()
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
@pytest.mark.parametrize("by_initial", [True, False])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize(("on", "counts"), COUNTS)
def test_ranks_with_different_numbers_of_batches(ranks_of, on, counts, by_initial, micro):
    ours, torch_replicas = (
        ranks_of(carrier, len(counts)).run(train_uneven, ddp, counts, by_initial, micro)
        for carrier, ddp in zip((on, "cpu"), BOTH, strict=True)
    )
    for replica, other in zip(ours, torch_replicas, strict=True):
        for number, (tensor, expected) in enumerate(zip(replica, other, strict=True)):
            is_buffer = 6 <= number < len(replica) - 1  # each rank's own, after its last forward
            assert is_buffer or torch.equal(tensor, ours[0][number])
            # With no_sync, a rank that is done gets buffers at other times than with PyTorch.
            if micro == 1 or not is_buffer:
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
