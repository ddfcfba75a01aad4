"""`DistributedDataParallel`, ours and PyTorch's, under the same tests.

A scenario trains for some steps, with different data on every rank, and returns what came out. It
runs with both classes on the same ranks: ours must give PyTorch's numbers (to rounding: their sums
may be in another order), and the same bits on all ranks. Where the whole batch on one machine is
the same algorithm, that is the oracle as well.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from course_lib.ddp import DistributedDataParallel, MinimalDDP
from course_lib.ranks import RankError
from course_lib.sharding import shard
from tests.helpers.ddp_scenarios import (
    BOTH,
    FEW,
    SMALL_CAP,
    WORLDS,
    batches,
    compare,
    expect,
    gradients,
    mlp,
    one_machine,
    own_shards,
    sgd,
    state_of,
    train,
)

# --- plain training -------------------------------------------------------------------------------


@pytest.mark.parametrize(("on", "k"), WORLDS)
def test_five_steps_equal_pytorch_s_and_those_of_one_machine(ranks_of, on, k):
    for cap in (SMALL_CAP, 25) if on == "simulated" else (SMALL_CAP,):
        expect([compare(ranks_of(on, k), train, cap)], one_machine(mlp(seed=0)))


def train_minimal(cap: float):
    net = mlp(seed=dist.get_rank())
    wrapped = MinimalDDP(net, cap, cap)
    optimizer = sgd(net)
    for x, y in own_shards():
        optimizer.zero_grad()
        with wrapped.no_sync():
            (mse_loss(wrapped(x), y) / 2).backward()
        (mse_loss(wrapped(x), y) / 2).backward()
        wrapped.finish()
        optimizer.step()
    return state_of(net)


@pytest.mark.parametrize("cap", [0, SMALL_CAP, 25])
@pytest.mark.parametrize(("on", "k"), [*FEW, ("simulated", 1), ("simulated", 4)])
def test_the_minimal_version_takes_the_same_steps(ranks_of, on, k, cap):
    expect(ranks_of(on, k).run(train_minimal, cap), one_machine(mlp(seed=0)))


def test_the_minimal_version_refuses_a_second_gradient(ranks_of):
    def two_backwards() -> None:
        wrapped = MinimalDDP(nn.Linear(2, 2))
        for _ in range(2):
            wrapped(torch.ones(1, 2)).sum().backward()

    with pytest.raises(RankError, match="a second gradient"):
        ranks_of("simulated", 2).run(two_backwards)


class Mixed(nn.Module):
    """float32 and float64 layers, a tied weight, a frozen one, one used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.first = nn.Linear(6, 6).double()
        self.middle = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6).double()
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(6, 3).double()
        self.frozen.weight.requires_grad_(False)

    def forward(self, x):
        x = self.tied(torch.tanh(self.first(x)))
        return self.frozen(self.middle(self.middle(x.float()).tanh()).double())


def train_mixed(ddp: type):
    net = Mixed()
    wrapped = ddp(net, bucket_cap_mb=SMALL_CAP)
    for x, y in own_shards():
        net.zero_grad()
        mse_loss(wrapped(x), y).backward()
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.1 * (p.grad if p.grad is not None else torch.zeros_like(p))
    return [tensor.double() for tensor in state_of(net)]


@pytest.mark.parametrize(("on", "k"), FEW)
def test_mixed_dtypes_tied_and_frozen_parameters(ranks_of, on, k):
    ours, torch_replicas = (ranks_of(on, k).run(train_mixed, ddp) for ddp in BOTH)
    torch.testing.assert_close(ours, torch_replicas, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours, k * [ours[0]], rtol=0, atol=0)


# --- accumulation ---------------------------------------------------------------------------------


def backward_outside_no_sync(ddp: type):
    """It is the forward that counts; and an exception must not leave no_sync switched on."""
    net = mlp(seed=0)
    wrapped = ddp(net)
    (x, y), (x2, y2), *_ = own_shards()
    with contextlib.suppress(KeyError), wrapped.no_sync():
        loss = mse_loss(wrapped(x), y)
        raise KeyError
    loss.backward()
    local = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    mse_loss(wrapped(x2), y2).backward()
    return local, [p.grad.clone() for p in net.parameters()]


@pytest.mark.parametrize(("on", "k"), FEW)
def test_no_sync_is_about_the_forward_and_ends_with_an_exception(ranks_of, on, k):
    ours, torch_replicas = (ranks_of(on, k).run(backward_outside_no_sync, ddp) for ddp in BOTH)
    torch.testing.assert_close(ours, torch_replicas, rtol=1e-11, atol=1e-12)
    assert not torch.equal(ours[0][0][0], ours[1][0][0])
    assert torch.equal(ours[0][1][0], ours[1][1][0])


# --- the rest -------------------------------------------------------------------------------------


def gradients_are_in_the_buckets() -> bool:
    net = mlp()
    wrapped = DistributedDataParallel(net)
    wrapped(torch.ones(2, 6).double()).sum().backward()
    gradients = [p.grad for p in net.parameters()]
    memory = gradients[0].untyped_storage()
    assert all(g.untyped_storage().data_ptr() == memory.data_ptr() for g in gradients)
    return memory.nbytes() <= sum(8 * (g.numel() + 32) for g in gradients)


def test_gradients_are_views_into_the_buckets(ranks_of):
    assert ranks_of("simulated", 2).run(gradients_are_in_the_buckets) == [True, True]


# --- parameters that a rank does not use in a step ------------------------------------------------


ignore_torch_warnings = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


class Branches(nn.Module):
    """Runs one of three branches, and never the last one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.branches = nn.ModuleList([nn.Linear(6, 3) for _ in range(4)]).double()
        self.shared = nn.Linear(3, 3).double()

    def forward(self, x, branch: int):
        return self.shared(self.branches[branch](x))


def train_branches(ddp: type, per_rank: bool, option: str):
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


def nothing_used_on_rank_0():
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
    expect([after for _, after in results], gradients(net))
