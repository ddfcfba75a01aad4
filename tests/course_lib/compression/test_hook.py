"""Hooks in DistributedDataParallel, ours and PyTorch's: equal replicas, the same steps."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from course_lib.compression import (
    CompressionState,
    ErrorFeedback,
    OneBit,
    PowerSGD,
    RandomK,
    TopK,
    compression_hook,
)
from course_lib.ddp import DistributedDataParallel
from tests.helpers.ddp_scenarios import SMALL_CAP, mlp, own_shards, sgd, state_of, steps


def train_compressed(ddp: type, make):
    net = mlp(seed=dist.get_rank())
    wrapped = ddp(net, bucket_cap_mb=SMALL_CAP)
    if make is not None:
        wrapped.register_comm_hook(CompressionState(make()), compression_hook)
    return steps(wrapped, net)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("on", "k"), [("simulated", 4), ("cpu", 2)])
def test_ours_and_pytorch_with_all_of_the_gradient(ranks_of, on: str, k: int) -> None:
    """A compressor that leaves nothing out is the all-reduce; the replicas stay equal with any."""
    ranks = ranks_of(on, k)
    exact = ranks.run(train_compressed, DistributedDataParallel, None)[0]
    for ddp in (DistributedDataParallel, TorchDDP):
        for make in (lambda: TopK(1.0), lambda: PowerSGD(9)):
            got = ranks.run(train_compressed, ddp, make)[0]
            torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-4)
        for make in (lambda: ErrorFeedback(OneBit()), lambda: ErrorFeedback(PowerSGD(1))):
            first, *replicas = ranks.run(train_compressed, ddp, make)
            for other in replicas:
                torch.testing.assert_close(other, first, rtol=0, atol=0)


def train_scaled(make):
    """Return the weights after each step, and the scale. In the second step rank 1 overflows."""
    net = mlp().float()
    wrapped = DistributedDataParallel(net, bucket_cap_mb=SMALL_CAP)
    wrapped.register_comm_hook(CompressionState(make()), compression_hook)
    optimizer, scaler = sgd(net), torch.amp.GradScaler("cpu", init_scale=8.0)
    states = []
    for step, (x, y) in enumerate(own_shards()):
        optimizer.zero_grad()
        loss = F.mse_loss(wrapped(x.float()), y.float())
        factor = torch.inf if (step, dist.get_rank()) == (1, 1) else 1.0
        scaler.scale(loss * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        states.append([tensor.clone() for tensor in state_of(net)])
    return states, scaler.get_scale()


@pytest.mark.parametrize(
    "make",
    [
        lambda: ErrorFeedback(OneBit()),
        lambda: ErrorFeedback(RandomK(0.1)),
        lambda: ErrorFeedback(PowerSGD(1)),
        lambda: PowerSGD(1),
    ],
)
def test_a_grad_scaler_skips_one_step_on_all_ranks(ranks_of, make) -> None:
    everyone = ranks_of("cpu", 2).run(train_scaled, make)
    for states, scale in everyone:
        assert scale == 4.0  # halved once
        moved = [not torch.equal(a[0], b[0]) for a, b in itertools.pairwise(states)]
        assert moved == [False, True, True, True]
        torch.testing.assert_close(states, everyone[0][0], rtol=0, atol=0)
