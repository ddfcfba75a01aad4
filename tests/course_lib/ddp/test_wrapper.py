"""`DistributedDataParallel`, ours and PyTorch's, under the same tests.

A scenario trains for some steps, with different data on every rank, and returns what came out. It
runs with both classes on the same ranks: ours must give PyTorch's numbers (to rounding: their sums
may be in another order), and the same bits on all ranks. Where the whole batch on one machine is
the same algorithm, that is the oracle as well.
"""

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from course_lib import cost_model
from course_lib.bucketing import MEGABYTE, assign_buckets
from course_lib.ddp import DistributedDataParallel, all_reduce_hook
from course_lib.gradient_sync import sync_flat, sync_per_parameter
from course_lib.ranks import RankError, Ranks
from course_lib.ranks.costs.computation import clock
from course_lib.ranks.costs.network import Device, Network
from course_lib.sharding import shard
from tests.helpers.ddp_scenarios import (
    BOTH,
    FEW,
    SMALL_CAP,
    STEPS,
    WORLDS,
    batches,
    compare,
    mlp,
    own_shards,
    sgd,
    state_of,
)

ignore_torch_warnings = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


# --- plain training -------------------------------------------------------------------------------


def train(ddp: type, cap: float = SMALL_CAP, **options: Any) -> list[Tensor]:
    net = mlp(seed=dist.get_rank())
    wrapped = ddp(net, bucket_cap_mb=cap, **options)
    optimizer = sgd(net)
    for x, y in own_shards():
        optimizer.zero_grad()
        mse_loss(wrapped(x), y).backward()
        optimizer.step()
    return state_of(net)


def one_machine(net: nn.Module) -> list[Tensor]:
    optimizer = sgd(net)
    for x, y in batches():
        optimizer.zero_grad()
        mse_loss(net(x), y).backward()
        optimizer.step()
    return state_of(net)


@pytest.mark.parametrize(("on", "k"), WORLDS)
def test_five_steps_equal_pytorch_s_and_those_of_one_machine(ranks_of, on, k):
    for cap in (SMALL_CAP, 25) if on == "simulated" else (SMALL_CAP,):
        state = compare(ranks_of(on, k), train, cap)
        for tensor, expected in zip(state, one_machine(mlp(seed=0)), strict=True):
            torch.testing.assert_close(tensor, expected, rtol=1e-11, atol=1e-12)


class Mixed(nn.Module):
    """float32 and float64 layers, a tied weight, a frozen one, one used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
        self.first = nn.Linear(6, 6).double()
        self.middle = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6).double()
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(6, 3).double()
        self.frozen.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tied(torch.tanh(self.first(x)))
        return self.frozen(self.middle(self.middle(x.float()).tanh()).double())


def train_mixed(ddp: type) -> list[Tensor]:
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
    ours, theirs = (ranks_of(on, k).run(train_mixed, ddp) for ddp in BOTH)
    net = Mixed()
    for x, y in batches():
        net.zero_grad()
        mse_loss(net(x), y).backward()
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.1 * (p.grad if p.grad is not None else torch.zeros_like(p))
    for replica in ours:
        for tensor, first, other, alone in zip(
            replica, ours[0], theirs[0], state_of(net), strict=True
        ):
            assert torch.equal(tensor, first)
            torch.testing.assert_close(tensor, other, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(tensor, alone.double(), rtol=1e-5, atol=1e-6)


# --- buffers --------------------------------------------------------------------------------------


def train_batch_norm(ddp: type, broadcast_buffers: bool) -> list[Tensor]:
    torch.manual_seed(dist.get_rank())
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    if broadcast_buffers:  # without, PyTorch's are not even equal at the start; ours always are
        net[1].running_mean.fill_(dist.get_rank())
    wrapped = ddp(net, broadcast_buffers=broadcast_buffers)
    optimizer = sgd(net)
    seen = []
    for step, (x, y) in enumerate(own_shards()):
        optimizer.zero_grad()
        mse_loss(wrapped(x), y).backward()
        optimizer.step()
        if step == 2:
            wrapped.eval()
            with torch.no_grad():
                seen.append(wrapped(torch.ones(2, 6).double()))
                seen.append(wrapped(x.sum() * torch.ones(2, 6).double()))
            wrapped.train()
    return [*seen, *state_of(net)]


@ignore_torch_warnings
@pytest.mark.parametrize("broadcast_buffers", [True, False])
@pytest.mark.parametrize(("on", "k"), FEW)
def test_buffers_are_the_first_rank_s(ranks_of, on, k, broadcast_buffers):
    ours, theirs = (ranks_of(on, k).run(train_batch_norm, ddp, broadcast_buffers) for ddp in BOTH)
    for replica, other in zip(ours, theirs, strict=True):
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


# --- unused parameters ----------------------------------------------------------------------------


class Branches(nn.Module):
    """Runs one of three branches, and never the last one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.branches = nn.ModuleList([nn.Linear(6, 3) for _ in range(4)]).double()
        self.shared = nn.Linear(3, 3).double()

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.shared(self.branches[branch](x))


def train_branches(ddp: type, per_rank: bool) -> list[Tensor]:
    net = Branches()
    wrapped = ddp(net, bucket_cap_mb=SMALL_CAP / 3, find_unused_parameters=True)
    optimizer = sgd(net)
    never = net.branches[3].weight.detach().clone()
    for step, (x, y) in enumerate(own_shards()):
        optimizer.zero_grad()
        branch = (step + per_rank * dist.get_rank()) % 3
        mse_loss(wrapped(x, branch), y).backward()
        optimizer.step()
    # Neither weight decay nor momentum moves what nobody uses: its gradient stays None.
    assert net.branches[3].weight.grad is None
    assert torch.equal(net.branches[3].weight, never)
    return state_of(net)


@ignore_torch_warnings
@pytest.mark.parametrize("per_rank", [False, True], ids=["same branch", "a branch per rank"])
@pytest.mark.parametrize(("on", "k"), [*FEW, ("cpu", 3)])
def test_a_branch_that_changes_with_the_step(ranks_of, on, k, per_rank):
    compare(ranks_of(on, k), train_branches, per_rank)


def leave_one_out(ddp: type) -> None:
    net = Branches()
    wrapped = ddp(net)
    for _ in range(2):  # PyTorch notices in the next forward
        wrapped(torch.ones(2, 6).double(), 0).sum().backward()


@pytest.mark.parametrize("ddp", BOTH)
@pytest.mark.parametrize(("on", "k"), FEW)
def test_an_unused_parameter_is_an_error(ranks_of, on, k, ddp):
    named = r"rank \d: .* no gradient to 'branches\.1\.weight', 'branches\.1\.bias'"
    with pytest.raises(
        RankError, match=named if ddp is DistributedDataParallel else "RuntimeError"
    ):
        ranks_of(on, k).run(leave_one_out, ddp)


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


# --- accumulation ---------------------------------------------------------------------------------


def accumulate(ddp: type, set_to_none: bool, cap: float) -> list[Tensor]:
    net = mlp(seed=dist.get_rank())
    wrapped = ddp(net, bucket_cap_mb=cap)
    optimizer = sgd(net)
    micro = own_shards(steps=9)
    for first in range(0, 9, 3):
        optimizer.zero_grad(set_to_none=set_to_none)
        with wrapped.no_sync():
            for x, y in micro[first : first + 2]:
                (mse_loss(wrapped(x), y) / 3).backward()
        x, y = micro[first + 2]
        (mse_loss(wrapped(x), y) / 3).backward()
        optimizer.step()
    return state_of(net)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(("on", "k"), FEW)
def test_accumulation_in_no_sync(ranks_of, on, k, set_to_none):
    state = compare(ranks_of(on, k), accumulate, set_to_none, SMALL_CAP)
    net = mlp(seed=0)
    optimizer = sgd(net)
    for first in range(0, 9, 3):
        optimizer.zero_grad()
        for x, y in batches(steps=9)[first : first + 3]:
            (mse_loss(net(x), y) / 3).backward()
        optimizer.step()
    for tensor, expected in zip(state, state_of(net), strict=True):
        torch.testing.assert_close(tensor, expected, rtol=1e-11, atol=1e-12)


def test_no_sync_costs_nothing(ranks_of):
    ranks = ranks_of("simulated", 3)
    ranks.run(accumulate, DistributedDataParallel, True, 25)
    assert ranks.trace.calls(0)["all_reduce"] == 3  # for nine backwards


def sums_without_zero_grad(ddp: type) -> list[Tensor]:
    net = mlp(seed=0)
    wrapped = ddp(net, bucket_cap_mb=SMALL_CAP)
    for x, y in own_shards():
        mse_loss(wrapped(x), y).backward()
    return [p.grad.clone() for p in net.parameters()]


@pytest.mark.parametrize(("on", "k"), FEW)
def test_gradients_that_are_not_cleared_add_up(ranks_of, on, k):
    gradients = compare(ranks_of(on, k), sums_without_zero_grad)
    net = mlp(seed=0)
    for x, y in batches():
        mse_loss(net(x), y).backward()
    for gradient, param in zip(gradients, net.parameters(), strict=True):
        torch.testing.assert_close(gradient, param.grad, rtol=1e-11, atol=1e-12)


def backward_outside_no_sync(ddp: type) -> tuple[list[Tensor], list[Tensor]]:
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
    ours, theirs = (ranks_of(on, k).run(backward_outside_no_sync, ddp) for ddp in BOTH)
    for (local, synced), (their_local, their_synced) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(local, their_local, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(synced, their_synced, rtol=1e-11, atol=1e-12)
    assert not torch.equal(ours[0][0][0], ours[1][0][0])
    assert torch.equal(ours[0][1][0], ours[1][1][0])


# --- uneven inputs --------------------------------------------------------------------------------


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


# --- hooks ----------------------------------------------------------------------------------------


def doubling_hook(state: dict[str, int], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Returns another tensor than the bucket's, and counts."""
    state["buckets"] = state.get("buckets", 0) + 1
    assert bucket.buffer().numel() == sum(g.numel() for g in bucket.gradients())
    assert [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
    state["last"] = bucket.index() if bucket.is_last() else -1
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: 2 * done.value()[0] / dist.get_world_size())


def train_hooked(ddp: type, which: str) -> list[Tensor]:
    net = mlp(seed=dist.get_rank())
    wrapped = ddp(net, bucket_cap_mb=SMALL_CAP)
    state: dict[str, int] = {}
    if which == "own":
        wrapped.register_comm_hook(state, doubling_hook)
    else:
        wrapped.register_comm_hook(None, getattr(default_hooks, which))
    optimizer = sgd(net)
    for x, y in own_shards():
        optimizer.zero_grad()
        mse_loss(wrapped(x), y).backward()
        optimizer.step()
    if which == "own" and ddp is DistributedDataParallel:
        assert state["buckets"] >= 2 * STEPS and state["last"] >= 1
    return state_of(net)


@pytest.mark.parametrize("which", ["allreduce_hook", "fp16_compress_hook", "own"])
@pytest.mark.parametrize(("on", "k"), FEW)
def test_comm_hooks_written_for_pytorch(ranks_of, on, k, which):
    if which != "fp16_compress_hook":
        compare(ranks_of(on, k), train_hooked, which)
        return
    # Half precision sums differently with the order, which depends on where buckets begin.
    ours, theirs = (ranks_of(on, k).run(train_hooked, ddp, which) for ddp in BOTH)
    for replica in ours:
        for tensor, first, other in zip(replica, ours[0], theirs[0], strict=True):
            assert torch.equal(tensor, first)
            torch.testing.assert_close(tensor, other, rtol=1e-2, atol=1e-2)


def train_with_wrapped_hook(ddp: type) -> list[Tensor]:
    """PowerSGD inside a hook that first replaces the bucket's buffer by one of half precision."""
    torch.manual_seed(dist.get_rank())
    net = nn.Linear(48, 48, bias=False)
    wrapped = ddp(net)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=8, start_powerSGD_iter=2, min_compression_rate=1
    )
    wrapped.register_comm_hook(
        state, default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)
    )
    optimizer = sgd(net)
    for _ in range(STEPS):
        optimizer.zero_grad()
        wrapped(torch.randn(8, 48)).square().mean().backward()
        optimizer.step()
    return state_of(net)


@ignore_torch_warnings
@pytest.mark.parametrize("k", [1, 2])
def test_a_hook_that_replaces_the_buffer_for_the_one_inside(ranks_of, k):
    ours, theirs = (ranks_of("cpu", k).run(train_with_wrapped_hook, ddp) for ddp in BOTH)
    for replica in ours:
        assert torch.equal(replica[0], ours[0][0])
        torch.testing.assert_close(replica[0], theirs[0][0], rtol=1e-2, atol=1e-3)


def train_with_constructor_hook(pair: bool) -> list[Tensor]:
    hook: Any = (dist.group.WORLD, all_reduce_hook) if pair else all_reduce_hook
    return train(DistributedDataParallel, comm_hook=hook)


@pytest.mark.parametrize("pair", [True, False])
def test_a_hook_given_to_the_constructor(ranks_of, pair):
    for tensor, expected in zip(
        ranks_of("cpu", 2).run(train_with_constructor_hook, pair)[1],
        one_machine(mlp(seed=0)),
        strict=True,
    ):
        torch.testing.assert_close(tensor, expected, rtol=1e-11, atol=1e-12)


# --- buckets: their number, their order, their time -----------------------------------------------


@pytest.mark.parametrize("cap", [0.0, 100 / MEGABYTE, SMALL_CAP, 25])
def test_number_and_size_of_collectives(ranks_of, cap):
    ranks = ranks_of("simulated", 3)
    ranks.run(train, DistributedDataParallel, cap)
    params = list(mlp().parameters())
    buckets = assign_buckets(params, cap)
    nbytes = [sum(8 * params[i].numel() for i in bucket) for bucket in buckets]
    for rank in range(3):
        sent = [e.bytes for e in ranks.trace.events if e.rank == rank and e.kind == "all_reduce"]
        # The gradients come from the last to the first, weight before bias or not: by the step.
        assert sent[: len(nbytes)] == nbytes
        assert sum(sent) == STEPS * sum(nbytes)


class Backwards(nn.Module):
    """Registers its layers in the opposite order of their use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(n, n, bias=False) for n in (4, 5, 6)])
        self.between = [torch.ones(5, 4), torch.ones(6, 5)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[2](x) @ self.between[1]
        return self.layers[0](self.layers[1](x) @ self.between[0])


def train_backwards() -> list[tuple[Tensor, Tensor]]:
    """Return for each parameter its gradient after one backward and after three, never cleared."""
    net = Backwards()
    wrapped = DistributedDataParallel(net, bucket_cap_mb=0)
    once: list[Tensor] = []
    for _ in range(3):
        wrapped(torch.ones(2, 6)).sum().backward()
        once = once or [p.grad.clone() for p in net.parameters()]
    return [(one, p.grad) for one, p in zip(once, net.parameters(), strict=True)]


@pytest.mark.parametrize(("on", "k"), FEW)
def test_buckets_are_made_anew_in_the_order_of_readiness(ranks_of, on, k):
    ranks = ranks_of(on, k)
    for once, three_times in ranks.run(train_backwards)[0]:
        torch.testing.assert_close(three_times, 3 * once)
    for rank in range(k):
        events = sorted((e for e in ranks.trace.events if e.rank == rank), key=lambda e: e.start)
        sent = [e.bytes for e in events if e.kind == "all_reduce"]
        assert sent == [4 * 36, 4 * 25, 4 * 16] + 2 * [4 * 16, 4 * 25, 4 * 36]


WIDTH, LAYERS, ROWS = 32, 6, 5
MATMUL = 2 * ROWS * WIDTH * WIDTH  # floating-point operations of one product of matrices


def one_step(strategy: str) -> tuple[float, float, float]:
    """Return when backward began, when all gradients were computed, and when they were averaged."""
    net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    x = torch.randn(ROWS, WIDTH)
    cap = 0 if strategy == "ddp" else 2 * 4 * WIDTH * WIDTH / MEGABYTE
    wrapped = DistributedDataParallel(net, cap, cap) if "ddp" in strategy else net
    sync = {"flat": sync_flat, "per parameter": sync_per_parameter}.get(strategy)
    computed = []
    net[0].weight.register_post_accumulate_grad_hook(lambda _: computed.append(clock()))
    for _ in range(2):
        net.zero_grad()
        loss = wrapped(x).sum()
        dist.barrier()
        start = clock()
        loss.backward()
        if sync:
            sync(net.parameters())
        end = clock()
    return start, computed[-1], end


@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.parametrize("speed", [1e6, 1e7, 1e9])
def test_the_ladder_on_a_slow_network(k, speed):
    """Per parameter > flat > buckets that overlap, each as long as its formula says."""
    network, device = Network(latency=2e-4, bandwidth=speed), Device(flops=1e7)
    ranks = Ranks(k, on="simulated", network=network, device=device)
    layer, nbytes = 2 * MATMUL / device.flops, 4 * WIDTH * WIDTH
    backward = LAYERS * layer - MATMUL / device.flops  # the input of the first needs no gradient
    times, first_launch = {}, {}
    for strategy in ("per parameter", "flat", "ddp", "ddp, two layers per bucket"):
        start, computed, end = ranks.run(one_step, strategy)[0]
        times[strategy] = end - start
        launches = [e.start for e in ranks.trace.events if e.kind == "all_reduce" and e.rank == 0]
        first_launch[strategy] = min(t for t in launches if t >= start)
        before_the_end = first_launch[strategy] < computed - 1e-12
        assert before_the_end == strategy.startswith("ddp"), strategy
    one = cost_model.ring_all_reduce_time(nbytes, k, network)
    every = cost_model.ring_all_reduce_time(LAYERS * nbytes, k, network)
    ready = [(i + 1) * layer for i in range(LAYERS - 1)] + [backward]
    in_pairs = overlapped(ready[1::2], cost_model.ring_all_reduce_time(2 * nbytes, k, network))
    expected = {
        "per parameter": backward + LAYERS * one,
        "flat": backward + every,
        "ddp": overlapped(ready, one),
        "ddp, two layers per bucket": in_pairs,
    }
    for strategy, time in times.items():
        assert time == pytest.approx(expected[strategy], rel=0.1), strategy
    best = min(times["ddp"], times["ddp, two layers per bucket"])
    assert times["per parameter"] > times["flat"] > best


def overlapped(ready: list[float], each: float) -> float:
    end = 0.0
    for time in ready:
        end = max(end, time) + each
    return end


# --- mistakes -------------------------------------------------------------------------------------


def mistake(which: str) -> None:
    net = mlp()
    x = torch.ones(2, 6).double()
    if which == "nothing to train":
        DistributedDataParallel(net.requires_grad_(False))
    elif which == "different models":
        DistributedDataParallel(nn.Linear(6, 3 + (dist.get_rank() == 1)))
    elif which == "negative cap":
        DistributedDataParallel(net, bucket_cap_mb=-1)
    elif which == "not a member":
        group = dist.new_group([0, 1])
        if dist.get_rank() == 2:
            DistributedDataParallel(net, group=group)
    elif which == "sparse":
        embedding = nn.Embedding(3, 2, sparse=True)
        wrapped = DistributedDataParallel(embedding)
        wrapped(torch.tensor([1])).sum().backward()
    wrapped = DistributedDataParallel(net)
    if which == "second backward":
        loss = wrapped(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    elif which == "the module itself":
        wrapped(x).sum().backward()
        wrapped.module(x).sum().backward()
    elif which == "dtype":
        net.float()
        wrapped(x.float()).sum().backward()
    elif which == "frozen, then not":
        net[0].weight.requires_grad_(False)
        wrapped = DistributedDataParallel(net)
        net[0].weight.requires_grad_(True)
        wrapped(x)
    elif which == "two hooks":
        wrapped.register_comm_hook(None, all_reduce_hook)
        wrapped.register_comm_hook(None, all_reduce_hook)
    elif which == "a hook without a tensor":
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result("nothing")
        wrapped.register_comm_hook(None, lambda state, bucket: future)
        wrapped(x).sum().backward()
    elif which == "a backward that failed":
        output = wrapped(x)
        net[0].weight.register_hook(_fail)
        with contextlib.suppress(KeyError):
            output.sum().backward()
        wrapped(x)


def _fail(_: Tensor) -> None:
    raise KeyError


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("nothing to train", "no parameter of this module needs a gradient"),
        ("different models", r"'weight' is \(3, 6\) .* on rank 0 and \(4, 6\) .* on rank 1"),
        ("negative cap", "bucket_cap_mb=-1"),
        ("not a member", "rank 2 is not a member"),
        ("sparse", r"rank \d: the gradient of 'weight' is sparse"),
        ("second backward", r"rank \d: backward\(\) reached '\d\..*' a second time"),
        ("the module itself", "and not its .module"),
        ("dtype", r"rank \d: '4\.(weight|bias)' has a gradient of .*float32, but was .*float64"),
        ("frozen, then not", r"'0\.weight' was frozen when it was wrapped"),
        ("two hooks", "only once"),
        ("a hook without a tensor", "must hold the reduced vector"),
        ("a backward that failed", r"rank \d: the last backward\(\) did not end"),
    ],
)
def test_mistakes_are_named(ranks_of, which, message):
    with pytest.raises(RankError, match=message):
        ranks_of("simulated", 3).run(mistake, which)


# --- the rest -------------------------------------------------------------------------------------


def in_a_group(members: list[int]) -> list[Tensor] | None:
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return None
    net = mlp(seed=dist.get_rank())
    place, k = members.index(dist.get_rank()), len(members)
    wrapped = DistributedDataParallel(net, SMALL_CAP, group=group)
    optimizer = sgd(net)
    for x, y in batches():
        optimizer.zero_grad()
        mse_loss(wrapped(shard(x, k, place)), shard(y, k, place)).backward()
        optimizer.step()
    return state_of(net)


@pytest.mark.parametrize("members", [[1, 3], [0, 2, 3]])
@pytest.mark.parametrize("on", ["simulated", "cpu"])
def test_a_group_of_some_ranks(ranks_of, on, members):
    replicas = ranks_of(on, 4).run(in_a_group, members)
    expected = one_machine(mlp(seed=members[0]))
    for rank in members:
        for tensor, first, wanted in zip(
            replicas[rank], replicas[members[0]], expected, strict=True
        ):
            assert torch.equal(tensor, first)
            torch.testing.assert_close(tensor, wanted, rtol=1e-11, atol=1e-12)


def wrapped_and_forgotten() -> bool:
    net = mlp()
    wrapped = DistributedDataParallel(net)
    gone = weakref.ref(wrapped)
    x = torch.ones(2, 6).double() * dist.get_rank()
    wrapped(x).sum().backward()
    del wrapped
    gc.collect()
    net.zero_grad()
    net(x).sum().backward()  # an ordinary module again: nothing is sent, nothing complains
    return gone() is None


def test_a_module_may_outlive_its_wrapper(ranks_of):
    assert ranks_of("simulated", 2).run(wrapped_and_forgotten) == [True, True]


def gradients_are_in_the_buckets() -> bool:
    net = mlp()
    wrapped = DistributedDataParallel(net)
    wrapped(torch.ones(2, 6).double()).sum().backward()
    gradients = [p.grad for p in net.parameters()]
    one = gradients[0].untyped_storage()
    assert all(g.untyped_storage().data_ptr() == one.data_ptr() for g in gradients)
    return one.nbytes() <= sum(8 * (g.numel() + 32) for g in gradients)


def test_gradients_are_views_into_the_buckets(ranks_of):
    assert ranks_of("simulated", 2).run(gradients_are_in_the_buckets) == [True, True]


def state_names(ddp: type) -> list[str]:
    return list(ddp(mlp()).state_dict())


def test_state_dicts_have_pytorch_s_names(ranks_of):
    ours, theirs = (ranks_of("simulated", 2).run(state_names, ddp)[0] for ddp in BOTH)
    assert ours == theirs
