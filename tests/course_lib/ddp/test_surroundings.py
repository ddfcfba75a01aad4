"""What a wrapped model meets in real programs: memory formats, copies, checkpointing, odd orders.

As in `test_ddp`, PyTorch's class is the oracle, on the same ranks with different data on each.
"""

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from course_lib.bucketing import lay_out_like
from course_lib.ddp import DistributedDataParallel
from course_lib.gradient_sync import sync_bucketed, sync_flat
from course_lib.peer_memory import shared_memory_group
from course_lib.ranks import RankError, Ranks
from tests.helpers.ddp_scenarios import FEW, SMALL_CAP, compare, mlp, own_shards, sgd, state_of

ignore_torch_warnings = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def gradients(net: nn.Module) -> list[Tensor]:
    return [torch.zeros(0) if p.grad is None else p.grad.clone() for p in net.parameters()]


# --- memory formats -------------------------------------------------------------------------------


def train_channels_last(wrap: Callable[[nn.Module], nn.Module] | str) -> list[Tensor]:
    """With an optimizer in one kernel, which goes through gradients as they lie in memory."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 5)).double()
    net = net.to(memory_format=torch.channels_last)
    net[2].weight = nn.Parameter(torch.randn(288, 5, dtype=torch.float64).T)
    sync = {"flat": sync_flat, "bucketed": sync_bucketed}.get(wrap) if wrap in SYNCS else None
    wrapped = net if sync else wrap(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    for step in range(4):
        optimizer.zero_grad()
        wrapped(random(2, 3, 8, 8, seed=step)).square().sum().backward()
        if sync:
            sync(net.parameters())
        optimizer.step()
    return state_of(net)


SYNCS = ("flat", "bucketed")


@pytest.mark.parametrize("k", [1, 2, 3])
def test_gradients_lie_as_their_parameters_do(ranks_of, k):
    expected = compare(ranks_of("cpu", k), train_channels_last)
    for sync in SYNCS:
        for replica in ranks_of("cpu", k).run(train_channels_last, sync):
            for tensor, wanted in zip(replica, expected, strict=True):
                torch.testing.assert_close(tensor, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(3, 4, 5),
        torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.empty(4, 6).T,
        torch.empty(2, 1, 3).permute(2, 0, 1),
        torch.empty(()),
        torch.empty(0, 3),
    ],
)
def test_a_view_has_the_strides_of_a_tensor_without_gaps(tensor):
    memory = torch.arange(float(tensor.numel() + 5))
    view = lay_out_like(tensor, memory[5:])
    assert view.shape == tensor.shape
    # How far apart the elements of a dimension with one of them are does not matter.
    assert all(
        ours == theirs
        for ours, theirs, size in zip(view.stride(), tensor.stride(), tensor.shape, strict=True)
        if size > 1 and tensor.numel()
    )
    assert sorted(view.flatten().tolist()) == memory[5:].tolist()


def test_a_tensor_with_gaps_gets_a_contiguous_view():
    view = lay_out_like(torch.empty(8, 6)[:, ::2], torch.arange(24.0))
    assert view.is_contiguous() and view.shape == (8, 3)


def reformatted_after_wrapping(kernel: int) -> None:
    net = nn.Conv2d(3, 8, kernel)
    wrapped = DistributedDataParallel(net)
    net.to(memory_format=torch.channels_last)
    wrapped(torch.ones(2, 3, 8, 8)).sum().backward()


def test_another_memory_format_after_wrapping_is_named_unless_it_moves_nothing(ranks_of):
    with pytest.raises(RankError, match=r"'weight' has the strides \(27, 1, 9, 3\), and had"):
        ranks_of("cpu", 2).run(reformatted_after_wrapping, 3)
    ranks_of("cpu", 2).run(reformatted_after_wrapping, 1)


# --- copies ---------------------------------------------------------------------------------------


def train_a_copy(ddp: type, how: str) -> list[Tensor]:
    original = ddp(mlp(seed=dist.get_rank()), bucket_cap_mb=SMALL_CAP)
    shards = own_shards()
    mse_loss(original(shards[0][0]), shards[0][1]).backward()
    if how == "deepcopy":
        copied = copy.deepcopy(original)
    else:
        file = io.BytesIO()
        torch.save(original, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    assert all(a is not b for a, b in zip(original.parameters(), copied.parameters(), strict=True))
    optimizer = sgd(copied)
    for x, y in shards:
        optimizer.zero_grad()
        mse_loss(copied(x), y).backward()
        optimizer.step()
    original.zero_grad()
    mse_loss(original(shards[1][0]), shards[1][1]).backward()  # and the original still works
    return [*state_of(copied.module), *gradients(original.module)]


@ignore_torch_warnings
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_copy_is_synchronised_as_well(ranks_of, k, how):
    compare(ranks_of("cpu", k), train_a_copy, how)


def copies_in_odd_moments(ddp: type) -> list[Tensor]:
    """Made in no_sync; of a wrapper partly frozen since; frozen as a whole, to be evaluated."""
    wrapped = ddp(mlp(seed=0), bucket_cap_mb=SMALL_CAP)
    wrapped.module[0].weight.requires_grad_(False)
    copied = copy.deepcopy(wrapped)
    for step in range(2):
        copied(random(4, 6, seed=step)).square().sum().backward()
    with torch.no_grad():
        evaluated = wrapped(torch.ones(2, 6).double())
    return [*gradients(copied.module), evaluated]


@ignore_torch_warnings
@pytest.mark.parametrize(("on", "k"), FEW)
def test_a_copy_of_a_wrapper_that_was_partly_frozen(ranks_of, on, k):
    compare(ranks_of(on, k), copies_in_odd_moments)


def copies_of_ours() -> list[Tensor]:
    group = shared_memory_group()
    wrapped = DistributedDataParallel(mlp(seed=0), group=group, allocate=group.memory.empty)
    if dist.get_rank() == 0:  # for an average of the weights, on one rank: nobody waits for others
        average = copy.deepcopy(wrapped).requires_grad_(False)
        file = io.BytesIO()
        torch.save(average, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
        assert torch.equal(
            again.eval()(torch.ones(1, 6).double()), average(torch.ones(1, 6).double())
        )
    with wrapped.no_sync():
        copied = copy.deepcopy(wrapped)
    with pytest.raises(TypeError, match="deepcopy"):
        copy.copy(wrapped)
    copied(random(4, 6)).square().sum().backward()
    return gradients(copied.module)


def test_copies_need_no_other_rank_and_forget_no_sync(ranks_of):
    first, second = ranks_of("cpu", 2).run(copies_of_ours)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def deepcopy_in_a_group() -> list[Tensor] | None:
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return None
    wrapped = DistributedDataParallel(mlp(seed=0), group=group)
    copied = copy.deepcopy(wrapped)
    assert copied.group is group
    copied(random(4, 6)).sum().backward()
    return gradients(copied.module)


def test_a_deep_copy_stays_in_its_group(ranks_of):
    first, nothing, last = ranks_of("cpu", 3).run(deepcopy_in_a_group)
    assert nothing is None
    assert all(torch.equal(a, b) for a, b in zip(first, last, strict=True))


def wrapped_twice(ddp: type) -> list[Tensor]:
    """The older wrapper is still there."""
    net = mlp(seed=0)
    older = ddp(net)
    older(random(4, 6)).sum().backward()
    net.zero_grad()
    newer = ddp(net)
    newer(random(4, 6, seed=1)).sum().backward()
    assert older is not newer
    return gradients(net)


def test_the_newest_wrapper_counts(ranks_of):
    compare(ranks_of("cpu", 2), wrapped_twice)


def hooks_left() -> int:
    net = mlp(seed=0)
    for _ in range(5):
        wrapped = DistributedDataParallel(net)
        wrapped(random(4, 6)).sum().backward()
        del wrapped
    return sum(len(p._post_accumulate_grad_hooks or ()) for p in net.parameters())


def test_a_wrapper_takes_its_hooks_with_it(ranks_of):
    assert ranks_of("cpu", 2).run(hooks_left) == [0, 0]


def the_older_wrapper() -> None:
    net = mlp(seed=0)
    older = DistributedDataParallel(net)
    newer = DistributedDataParallel(net)
    newer(random(4, 6)).sum().backward()
    older(random(4, 6))


def wrapped_inside() -> None:
    DistributedDataParallel(nn.Sequential(DistributedDataParallel(mlp()), nn.Linear(3, 2)))


@pytest.mark.parametrize(
    ("mistake", "message"),
    [(the_older_wrapper, "wrapped again since"), (wrapped_inside, "wrapped already")],
)
def test_two_wrappers_of_one_module(ranks_of, mistake, message):
    with pytest.raises(RankError, match=message):
        ranks_of("simulated", 2).run(mistake)


# --- checkpointing, and forwards and backwards in other orders ------------------------------------


class Checkpointed(nn.Module):
    """Three layers, each computed anew in backward; the last one too, or not."""

    def __init__(self, reentrant: bool, head: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double() for _ in range(3)
        )
        self.head = nn.Linear(6, 3).double() if head else nn.Identity()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return {"a nested": [self.head(x)]}


def train_checkpointed(ddp: type, reentrant: bool, head: bool) -> list[Tensor]:
    net = Checkpointed(reentrant, head)
    wrapped = ddp(net, bucket_cap_mb=SMALL_CAP)
    optimizer = sgd(net)
    for step in range(3):
        optimizer.zero_grad()
        wrapped(random(4, 6, seed=step).requires_grad_())["a nested"][0].square().sum().backward()
        optimizer.step()
    return state_of(net)


@ignore_torch_warnings
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize(("on", "k"), FEW)
def test_activation_checkpointing(ranks_of, on, k, reentrant, head):
    compare(ranks_of(on, k), train_checkpointed, reentrant, head)


def two_forwards(ddp: type, between: str) -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    wrapped = ddp(net, bucket_cap_mb=SMALL_CAP)
    losses = []
    for step in range(3):
        net.zero_grad()
        loss = wrapped(random(4, 6, seed=step)).pow(3).sum()
        if between == "another of the same step":
            loss = loss + wrapped(random(4, 6, seed=9)).pow(2).sum()
        elif between == "without gradients":
            with torch.no_grad():
                wrapped(random(4, 6, seed=9))
        elif between == "in no_sync":
            with wrapped.no_sync():
                wrapped(random(4, 6, seed=9))
        loss.backward()
        losses += gradients(net)
    return losses


@pytest.mark.parametrize(
    "between", ["another of the same step", "without gradients", "in no_sync", "nothing"]
)
@pytest.mark.parametrize(("on", "k"), FEW)
def test_a_forward_between_forward_and_backward(ranks_of, on, k, between):
    compare(ranks_of(on, k), two_forwards, between)


def gradient_of_the_input_first(ddp: type) -> list[Tensor]:
    """A backward that reaches no parameter, through the same graph, before the one that does."""
    net = mlp(seed=0)
    wrapped = ddp(net, bucket_cap_mb=SMALL_CAP)
    x = random(4, 6).requires_grad_()
    loss = wrapped(x).square().sum()
    (inner,) = torch.autograd.grad(loss, x, retain_graph=True)
    assert inner.abs().sum() > 0
    loss.backward()
    return gradients(net)


def test_a_backward_for_the_inputs_alone_does_not_count(ranks_of):
    compare(ranks_of("cpu", 2), gradient_of_the_input_first)


class FailsOnce(torch.autograd.Function):
    failed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if not FailsOnce.failed:
            FailsOnce.failed = True
            raise MemoryError
        return gradient


def a_backward_that_is_tried_again(ddp: type) -> list[Tensor]:
    net = mlp(seed=0)
    wrapped = ddp(nn.Sequential(net, nn.Tanh()), bucket_cap_mb=SMALL_CAP)
    FailsOnce.failed = False
    wrapped.module[1].forward = FailsOnce.apply
    collected = []
    for step in range(2):
        net.zero_grad()
        loss = wrapped(random(4, 6, seed=step)).square().sum()
        with contextlib.suppress(MemoryError):
            loss.backward(retain_graph=True)
        if step == 0:
            loss.backward()
        collected += gradients(net)
    return collected


def test_a_backward_that_failed_before_any_gradient_can_be_tried_again(ranks_of):
    compare(ranks_of("cpu", 2), a_backward_that_is_tried_again)


class ReturnsItsScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 3).double()
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.scale


def hooks_on_outputs(ddp: type) -> list[Tensor]:
    net = ReturnsItsScale()
    wrapped = ddp(net)
    for step in range(3):
        output, scale = wrapped(random(4, 6, seed=step))
        (output * scale).square().sum().backward()
    return [*gradients(net), torch.tensor(len(net.scale._backward_hooks or ()))]


def test_a_parameter_that_is_returned_keeps_no_hooks(ranks_of):
    assert compare(ranks_of("cpu", 2), hooks_on_outputs)[-1] == 0


# --- what changes on the way ----------------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (nn.Linear(6, 3).double() for _ in range(2))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.a(x) + self.b(x) if both else self.a(x)


def train_branches(ddp: type) -> list[Tensor]:
    """The second branch runs in no_sync only, and there on one rank only."""
    net = Branches()
    wrapped = ddp(net, find_unused_parameters=True)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        with wrapped.no_sync():
            wrapped(random(4, 6, seed=step), dist.get_rank() == 0).square().sum().backward()
        wrapped(random(4, 6, seed=step + 7), False).square().sum().backward()
        optimizer.step()
    return state_of(net)


@pytest.mark.parametrize(("on", "k"), FEW)
def test_a_parameter_used_in_no_sync_only(ranks_of, on, k):
    compare(ranks_of(on, k), train_branches)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3).double()
        self.register_buffer("other", torch.zeros(1))  # PyTorch's looks for buffers if it saw one

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self.inner, "seen"):
            self.inner.seen += x.sum().detach()
        return self.inner(x)


def buffer_after_wrapping(ddp: type) -> list[Tensor]:
    torch.manual_seed(0)
    net = Counting()
    wrapped = ddp(net)
    net.inner.register_buffer("seen", torch.zeros((), dtype=torch.float64))
    for step in range(3):
        wrapped(random(4, 6, seed=step)).sum().backward()
    wrapped(torch.zeros(4, 6).double())  # broadcasts once more, and adds nothing
    return state_of(net)


def test_a_buffer_that_was_registered_after_wrapping(ranks_of):
    compare(ranks_of("cpu", 2), buffer_after_wrapping)


def wrong_hook(result: Any) -> None:
    wrapped = DistributedDataParallel(mlp())
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(torch.ones(1))
    wrapped.register_comm_hook(None, lambda state, bucket: future if result else None)
    wrapped(random(4, 6)).sum().backward()


@pytest.mark.parametrize(
    ("result", "message"), [(True, "1 numbers, for a bucket with"), (False, "a future .* not None")]
)
def test_what_a_hook_must_return(result, message):
    with pytest.raises(RankError, match=message):
        Ranks(2, on="simulated").run(wrong_hook, result)
