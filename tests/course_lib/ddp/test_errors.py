"""Mistakes are named, on the rank that made them; hooks are PyTorch's."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from course_lib.ddp import DistributedDataParallel, all_reduce_hook
from course_lib.ranks import RankError
from tests.helpers import ddp_scenarios as scenarios

UNMADE = {
    "lazy": lambda: nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1)),
    "meta buffer": lambda: nn.BatchNorm1d(3).apply(_without_statistics),
}


def _without_statistics(norm: nn.Module) -> None:
    norm.running_mean = norm.running_mean.to("meta")


def mistake(case: str) -> None:
    if case in UNMADE:
        DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), UNMADE[case]()))
    net = scenarios.mlp()
    x = torch.ones(2, 6).double()
    if case == "nothing to train":
        DistributedDataParallel(net.requires_grad_(False))
    elif case == "not a member":
        group = dist.new_group([0, 1])
        if dist.get_rank() == 2:
            DistributedDataParallel(net, group=group)
    elif case == "sparse":
        embedding = nn.Embedding(3, 2, sparse=True)
        wrapped = DistributedDataParallel(embedding)
        wrapped(torch.tensor([1])).sum().backward()
    wrapped = DistributedDataParallel(net)
    if case == "second backward":
        loss = wrapped(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    elif case == "the module itself":
        wrapped(x).sum().backward()
        wrapped.module(x).sum().backward()
    elif case == "converted before backward":
        loss = wrapped(x).sum()
        net[4].weight.data = net[4].weight.t().contiguous().t()
        loss.backward()
    elif case == "a newer wrapper":
        DistributedDataParallel(net)
        wrapped(x)
    elif case == "wrapped inside":
        DistributedDataParallel(nn.Sequential(wrapped, nn.Linear(3, 2)))
    elif case == "two hooks":
        wrapped.register_comm_hook(None, all_reduce_hook)
        wrapped.register_comm_hook(None, all_reduce_hook)
    elif case.startswith("a hook that returns"):
        future = torch.futures.Future()
        future.set_result(torch.ones(1))
        wrapped.register_comm_hook(None, lambda *_: None if "None" in case else future)
        wrapped(x).sum().backward()
    elif case.startswith("a backward that failed"):
        output = wrapped(x)
        net[0].weight.register_hook(_fail)
        with contextlib.suppress(KeyError):
            output.sum().backward()
        with wrapped.no_sync() if "no_sync" in case else contextlib.nullcontext():
            wrapped(x)


def _fail(_) -> None:
    raise KeyError


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("nothing to train", "no parameter of this module needs a gradient"),
        ("lazy", r"rank \d: '1\.0\.weight' has no numbers yet"),
        ("meta buffer", r"rank \d: '1\.running_mean' has no numbers yet"),
        ("not a member", "rank 2 is not a member"),
        ("sparse", r"rank \d: the gradient of 'weight' is sparse"),
        ("second backward", r"rank \d: backward\(\) reached '\d\..*' a second time"),
        ("the module itself", "and not its .module"),
        ("converted before backward", r"rank \d: '4\.weight' .* \(9, 1\),.* now .* \(1, 3\),"),
        ("a newer wrapper", "wrapped again, and"),
        ("wrapped inside", "wrapped already"),
        ("two hooks", "there is a comm hook already"),
        ("a hook that returns one number", "of size 1, but the bucket"),
        ("a hook that returns None", "a future .* not None"),
        ("a backward that failed", r"rank \d: the last backward\(\) did not end"),
        ("a backward that failed, no_sync", r"rank \d: the last backward\(\) did not end"),
    ],
)
def test_mistakes_are_named(ranks_of, case, message):
    with pytest.raises(RankError, match=message):
        ranks_of("simulated", 3).run(mistake, case)


# --- hooks written for PyTorch do the same here ---------------------------------------------------


def doubling_hook(state: dict[str, int], bucket: dist.GradBucket):
    """Returns another tensor than the bucket's, and counts."""
    state["buckets"] = state.get("buckets", 0) + 1
    assert bucket.buffer().numel() == sum(g.numel() for g in bucket.gradients())
    assert [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
    state["last"] = bucket.index() if bucket.is_last() else -1
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda future: 2 * future.value()[0] / dist.get_world_size())


def train_hooked(ddp: type, hook):
    net, state = scenarios.mlp(seed=dist.get_rank()), {} if hook is doubling_hook else None
    wrapped = ddp(net, bucket_cap_mb=scenarios.SMALL_CAP)
    wrapped.register_comm_hook(state, hook)
    trained = scenarios.steps(wrapped, net)
    if state and ddp is DistributedDataParallel:
        assert state["buckets"] >= 2 * scenarios.STEPS and state["last"] >= 1
    return trained


@pytest.mark.parametrize("hook", [default_hooks.allreduce_hook, doubling_hook])
@pytest.mark.parametrize(("on", "k"), scenarios.FEW)
def test_comm_hooks_written_for_pytorch(ranks_of, on, k, hook):
    scenarios.compare(ranks_of(on, k), train_hooked, hook)


@pytest.mark.parametrize("hook", [all_reduce_hook, (None, all_reduce_hook)])
def test_a_hook_given_to_the_constructor(ranks_of, hook):
    replicas = ranks_of("cpu", 2).run(
        lambda: scenarios.train(DistributedDataParallel, comm_hook=hook)
    )
    scenarios.expect(replicas, scenarios.one_machine(scenarios.mlp(seed=0)))
