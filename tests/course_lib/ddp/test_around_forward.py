"""Around a forward: names to leave alone, joins that end early, and buffers."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from course_lib.ddp import DistributedDataParallel
from course_lib.ranks import DeadlockError, MismatchError
from tests.helpers.ddp_scenarios import BOTH, FEW, SMALL_CAP, mlp, own_shards, random, sgd, state_of


class Counter(nn.Module):
    """Counts, on every rank, something of its own; and holds a buffer in a submodule."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 2).double()
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        self.norm = nn.BatchNorm1d(2).double()

    def forward(self, x):
        self.seen += dist.get_rank() + 1
        return self.norm(self.layer(x))


# --- names to leave alone -------------------------------------------------------------------------


def ignoring(by: str):
    net = Counter()
    net.seen += dist.get_rank()
    net.layer.bias.data += dist.get_rank()
    net.tied = net.layer.weight  # a second name, which is not ignored
    names = ["seen", "layer.bias", "layer.weight"]
    if by == "ours":
        wrapped = DistributedDataParallel(net, ignored=names)
    else:
        TorchDDP._set_params_and_buffers_to_ignore_for_model(net, names)
        wrapped = {"theirs, with ours": DistributedDataParallel, "theirs": TorchDDP}[by](net)
    wrapped(random(4, 6)).square().sum().backward()
    tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    grads = {f"grad of {name}": p.grad for name, p in net.named_parameters()}
    return {name: tensor.detach() for name, tensor in (tensors | grads).items()}


@pytest.mark.parametrize("by", ["ours", "theirs, with ours"])
@pytest.mark.parametrize(("on", "k"), FEW)
def test_ignored_names_stay_each_rank_s_own(ranks_of, on, k, by):
    replicas = ranks_of(on, k).run(ignoring, by)
    differing = {
        name for name in replicas[0] if not torch.equal(replicas[0][name], replicas[1][name])
    }
    expected = {"seen", "layer.bias", "grad of layer.bias"}
    statistics = {name for name in replicas[0] if name.startswith("norm.running")}
    assert differing - statistics == expected
    assert "grad of tied" in replicas[0] or "grad of layer.weight" in replicas[0]


# --- join -----------------------------------------------------------------------------------------


def ending_early(ddp: type, counts: list[int]) -> tuple[int, str]:
    net = mlp(seed=0)
    wrapped = ddp(net)
    steps = 0
    try:
        with wrapped.join(throw_on_early_termination=True):
            for step in range(counts[dist.get_rank()]):
                wrapped(random(4, 6, seed=step)).sum().backward()
                steps += 1
    except RuntimeError as error:
        with wrapped.join(enable=False):
            wrapped(random(4, 6)).sum().backward()  # and then it goes on as before
        return steps, str(error)
    return steps, "no error"


@pytest.mark.parametrize("counts", [[2, 4, 2], [3, 3], [5, 1]])
@pytest.mark.parametrize("on", ["simulated", "cpu"])
def test_the_first_rank_that_is_done_may_end_it_for_all(ranks_of, on, counts):
    ours, torch_results = (
        ranks_of(carrier, len(counts)).run(ending_early, ddp, counts)
        for carrier, ddp in zip((on, "cpu"), BOTH, strict=True)
    )
    for (steps, message), (their_steps, they_said) in zip(ours, torch_results, strict=True):
        assert steps == their_steps
        assert message.startswith(they_said.rstrip("."))


# --- buffers --------------------------------------------------------------------------------------


ignore_torch_warnings = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def train_batch_norm(ddp: type, broadcast_buffers: bool):
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
    torch.testing.assert_close(ours, torch_replicas, rtol=1e-11, atol=1e-12)
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


# --- ranks with different numbers of batches ------------------------------------------------------


def train_uneven(ddp: type, counts: list[int], by_initial: bool, micro: int):
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
