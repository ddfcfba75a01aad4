"""Hooks written for PyTorch do the same here."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.functional import mse_loss

from course_lib.ddp import DistributedDataParallel, all_reduce_hook
from course_lib.ranks import RankError, Ranks
from tests.helpers.ddp_scenarios import (
    FEW,
    SMALL_CAP,
    STEPS,
    compare,
    mlp,
    one_machine,
    own_shards,
    random,
    sgd,
    state_of,
    train,
)


def doubling_hook(state: dict[str, int], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Returns another tensor than the bucket's, and counts."""
    state["buckets"] = state.get("buckets", 0) + 1
    assert bucket.buffer().numel() == sum(g.numel() for g in bucket.gradients())
    assert [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
    state["last"] = bucket.index() if bucket.is_last() else -1
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda future: 2 * future.value()[0] / dist.get_world_size())


def train_hooked(ddp: type, hook: str) -> list[Tensor]:
    net = mlp(seed=dist.get_rank())
    wrapped = ddp(net, bucket_cap_mb=SMALL_CAP)
    state: dict[str, int] = {}
    if hook == "own":
        wrapped.register_comm_hook(state, doubling_hook)
    else:
        wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    optimizer = sgd(net)
    for x, y in own_shards():
        optimizer.zero_grad()
        mse_loss(wrapped(x), y).backward()
        optimizer.step()
    if hook == "own" and ddp is DistributedDataParallel:
        assert state["buckets"] >= 2 * STEPS and state["last"] >= 1
    return state_of(net)


@pytest.mark.parametrize("hook", ["allreduce_hook", "own"])
@pytest.mark.parametrize(("on", "k"), FEW)
def test_comm_hooks_written_for_pytorch(ranks_of, on, k, hook):
    compare(ranks_of(on, k), train_hooked, hook)


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


def wrong_hook(result: Any) -> None:
    wrapped = DistributedDataParallel(mlp())
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(torch.ones(1))
    wrapped.register_comm_hook(None, lambda state, bucket: future if result else None)
    wrapped(random(4, 6)).sum().backward()


@pytest.mark.parametrize(
    ("result", "message"), [(True, "of size 1, but the bucket"), (False, "a future .* not None")]
)
def test_what_a_hook_must_return(result, message):
    with pytest.raises(RankError, match=message):
        Ranks(2, on="simulated").run(wrong_hook, result)
