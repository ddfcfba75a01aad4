"""In DistributedDataParallel, ours and PyTorch's: equal replicas, and digits learned as well."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from course_lib.compression import (
    QSGD,
    CompressionState,
    Compressor,
    ErrorFeedback,
    OneBit,
    PowerSGD,
    RandomK,
    TopK,
    Uniform8Bit,
    compression_hook,
)
from course_lib.data import digits
from course_lib.ddp import DistributedDataParallel
from course_lib.sharding import shard
from tests.helpers.ddp_scenarios import BOTH, SMALL_CAP, mlp, own_shards, sgd, state_of
from tests.helpers.folding import over


def train_compressed(ddp: type, make: Callable[[], Compressor] | None) -> list[Tensor]:
    net = mlp(seed=dist.get_rank())
    wrapped = ddp(net, bucket_cap_mb=SMALL_CAP)
    if make is not None:
        wrapped.register_comm_hook(CompressionState(make()), compression_hook)
    optimizer = sgd(net)
    for x, y in own_shards():
        optimizer.zero_grad()
        F.mse_loss(wrapped(x), y).backward()
        optimizer.step()
    return state_of(net)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("on", "k"), [("simulated", 3), ("cpu", 2)])
@over("ddp", BOTH)
@over(
    "make",
    [
        lambda: ErrorFeedback(TopK(0.1)),
        lambda: ErrorFeedback(OneBit()),
        lambda: ErrorFeedback(PowerSGD(1)),
        lambda: RandomK(0.5, unbiased=True),
        lambda: ErrorFeedback(Uniform8Bit()),
    ],
)
def test_replicas_stay_equal(ranks_of, on: str, k: int, ddp: type, make: object) -> None:
    results = ranks_of(on, k).run(train_compressed, ddp, make)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("on", "k"), [("simulated", 4), ("cpu", 2)])
def test_ours_and_pytorch_with_all_of_the_gradient(ranks_of, on: str, k: int) -> None:
    """A compressor that leaves nothing out is the all-reduce."""
    ranks = ranks_of(on, k)
    exact = ranks.run(train_compressed, DistributedDataParallel, None)[0]
    for ddp in (DistributedDataParallel, TorchDDP):
        for make in (lambda: TopK(1.0), lambda: PowerSGD(9)):
            got = ranks.run(train_compressed, ddp, make)[0]
            for a, b in zip(got, exact, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def learn_digits(make: Callable[[], Compressor] | None, seed: int) -> float:
    """Train on this rank's shard of every batch; return the accuracy on what was held back."""
    train, test = (each.tensors for each in digits())
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    hook = None if make is None else (CompressionState(make()), compression_hook)
    wrapped = DistributedDataParallel(net, comm_hook=hook)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    order = torch.Generator().manual_seed(seed)
    rank, k = dist.get_rank(), dist.get_world_size()
    for _ in range(10):
        for batch in torch.randperm(len(train[0]), generator=order).split(64):
            rows = shard(batch, k, rank)
            optimizer.zero_grad()
            F.cross_entropy(wrapped(train[0][rows]), train[1][rows]).backward()
            optimizer.step()
    return float((net(test[0]).argmax(1) == test[1]).float().mean())


COMPRESSED: dict[str, Callable[[], Compressor]] = {
    "top-k": lambda: ErrorFeedback(TopK(0.05)),
    "random-k": lambda: ErrorFeedback(RandomK(0.2)),
    "8 bit": lambda: ErrorFeedback(Uniform8Bit()),
    "one bit": lambda: ErrorFeedback(OneBit()),
    "QSGD": lambda: ErrorFeedback(QSGD(127)),
    # Blocks so short that 7 levels are a contraction too: 32/7² < 1; else residuals grow.
    "QSGD, 5 bits": lambda: ErrorFeedback(QSGD(7, block=32)),
    "PowerSGD": lambda: ErrorFeedback(PowerSGD(2)),
}


@pytest.mark.large
def test_digits_within_one_percent(ranks_of) -> None:
    """Five seeds each; the mean difference to the uncompressed run, with its interval."""
    ranks = ranks_of("simulated", 2)
    exact = [ranks.run(learn_digits, None, seed)[0] for seed in range(5)]
    assert sum(exact) / 5 > 0.93
    for name, make in COMPRESSED.items():
        lost = torch.tensor(
            [a - ranks.run(partial(learn_digits, make), seed)[0] for seed, a in enumerate(exact)]
        )
        interval = 2.78 * float(lost.std()) / math.sqrt(5)  # Student's t, 4 degrees, 95 %
        print(f"{name}: {lost.mean():+.2%} ± {interval:.2%} of accuracy lost")
        assert lost.mean() + interval < 0.01, name
