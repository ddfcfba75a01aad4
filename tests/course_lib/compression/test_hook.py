"""Hooks in DistributedDataParallel, ours and PyTorch's: equal replicas, the same steps."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from course_lib.compression import (
    CompressionState,
    Compressor,
    ErrorFeedback,
    OneBit,
    PowerSGD,
    TopK,
    compression_hook,
)
from course_lib.ddp import DistributedDataParallel
from tests.helpers.ddp_scenarios import SMALL_CAP, mlp, own_shards, sgd, state_of


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
            first, *others = ranks.run(train_compressed, ddp, make)
            for other in others:
                torch.testing.assert_close(other, first, rtol=0, atol=0)
