"""Copies of a wrapped model, and several wrappers of one: each is synchronised as it should be."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from course_lib.ddp import DistributedDataParallel
from course_lib.peer_memory import shared_memory_group
from course_lib.ranks import RankError
from tests.helpers.ddp_scenarios import (
    FEW,
    SMALL_CAP,
    compare,
    gradients,
    mlp,
    own_shards,
    random,
    sgd,
    state_of,
)
from tests.helpers.folding import over

ignore_torch_warnings = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


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
@over("how", ["deepcopy", "pickle"])
@over("k", [1, 2, 3])
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


@over(
    "mistake, message",
    [
        (the_older_wrapper, "wrapped again, and"),
        (wrapped_inside, "wrapped already"),
    ],
)
def test_two_wrappers_of_one_module(ranks_of, mistake, message):
    with pytest.raises(RankError, match=message):
        ranks_of("simulated", 2).run(mistake)
