"""Mistakes are named, on the rank that made them."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.ddp import DistributedDataParallel, all_reduce_hook
from course_lib.ranks import RankError
from tests.helpers.ddp_scenarios import mlp

UNMADE = {
    "lazy": lambda: nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1)),
    "lazy buffer": lambda: nn.LazyBatchNorm1d(affine=False),
    "meta": lambda: nn.Linear(3, 1, device="meta"),
    "meta buffer": lambda: nn.BatchNorm1d(3).apply(_without_statistics),
}


def _without_statistics(norm: nn.Module) -> None:
    norm.running_mean = norm.running_mean.to("meta")


def mistake(case: str) -> None:
    if case in UNMADE:
        DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), UNMADE[case]()))
    net = mlp()
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
    elif case.startswith("a backward that failed"):
        output = wrapped(x)
        net[0].weight.register_hook(_fail)
        with contextlib.suppress(KeyError):
            output.sum().backward()
        with wrapped.no_sync() if "no_sync" in case else contextlib.nullcontext():
            wrapped(x)


def _fail(_: Tensor) -> None:
    raise KeyError


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("nothing to train", "no parameter of this module needs a gradient"),
        ("lazy", r"rank \d: '1\.0\.weight' has no numbers yet"),
        ("lazy buffer", r"rank \d: '1\.running_mean' has no numbers yet"),
        ("meta", r"rank \d: '1\.weight' has no numbers yet"),
        ("meta buffer", r"rank \d: '1\.running_mean' has no numbers yet"),
        ("not a member", "rank 2 is not a member"),
        ("sparse", r"rank \d: the gradient of 'weight' is sparse"),
        ("second backward", r"rank \d: backward\(\) reached '\d\..*' a second time"),
        ("the module itself", "and not its .module"),
        (
            "converted before backward",
            r"rank \d: '4\.weight' had strides \(9, 1\), and now has \(1, 3\)",
        ),
        ("a newer wrapper", "wrapped again, and"),
        ("wrapped inside", "wrapped already"),
        ("two hooks", "there is a comm hook already"),
        ("a backward that failed", r"rank \d: the last backward\(\) did not end"),
        ("a backward that failed, no_sync", r"rank \d: the last backward\(\) did not end"),
    ],
)
def test_mistakes_are_named(ranks_of, case, message):
    with pytest.raises(RankError, match=message):
        ranks_of("simulated", 3).run(mistake, case)
