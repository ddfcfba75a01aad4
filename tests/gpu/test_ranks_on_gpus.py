"""Ranks on GPUs: one each where there are enough, else several on one. Run by ``make gpu``.

``python benchmarks/gpu.py --emulated`` runs them on CPU ranks with NCCL's semantics, so that no
line of them is untried.
"""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from course_lib.collectives import (
    central_all_reduce,
    halving_doubling_all_reduce,
    ring_all_reduce,
    tree_all_reduce,
)
from course_lib.ddp import DistributedDataParallel
from course_lib.gradient_sync import sync_bucketed, sync_flat, sync_per_parameter
from course_lib.ranks import DeadlockError, MismatchError, RankError, Ranks, RankTimeout
from tests.helpers.emulated_nccl import emulate
from tests.helpers.student_bugs import all_send_first, one_raises, one_skips, other_shape

pytestmark = pytest.mark.gpu

EMULATED = os.environ.get("SGD_TO_DDP_EMULATED") == "1"
ON, DEVICE = ("cpu", "cpu") if EMULATED else ("gpu", "cuda")
K = (2, 4) if EMULATED else (1, 2, 4)


@pytest.fixture(scope="module", params=K, ids=lambda k: f"K={k}")
def ranks(request: pytest.FixtureRequest):
    with Ranks(request.param, on=ON, timeout=60) as ranks:
        if EMULATED:
            ranks.run(emulate)
        yield ranks


def own_values(*shape: int):
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(*shape, generator=generator).to(DEVICE)


def test_every_rank_has_its_device(ranks: Ranks) -> None:
    def place() -> tuple[str, float]:
        x = torch.ones(3, device=DEVICE) * dist.get_rank()
        dist.all_reduce(x)
        return str(x.device), x[0].item()

    k = ranks.world_size
    places = ranks.run(place)
    assert [device for device, _ in places] == ranks.devices
    assert {total for _, total in places} == {k * (k - 1) / 2}


ALGORITHMS = [central_all_reduce, tree_all_reduce, ring_all_reduce, halving_doubling_all_reduce]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda f: f.__name__)
def test_all_reduces_by_hand_equal_the_library(ranks: Ranks, algorithm: object) -> None:
    def both(length: int, dtype: torch.dtype):
        ours = own_values(length).to(dtype)
        expected = ours.clone()
        algorithm(ours)
        dist.all_reduce(expected)
        return ours, expected

    for length in (0, 1, 5, 1001):
        for dtype in (torch.float32, torch.bfloat16):
            for ours, expected in ranks.run(both, length, dtype):
                tolerance = 1e-5 if dtype is torch.float32 else 0.1
                torch.testing.assert_close(ours, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("sync", [sync_per_parameter, sync_flat, sync_bucketed])
def test_gradients_are_averaged(ranks: Ranks, sync: object) -> None:
    def gradients():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3)).to(DEVICE)
        model(own_values(4, 8)).square().sum().backward()
        single = [param.grad.clone() for param in model.parameters()]
        for gradient in single:
            dist.all_reduce(gradient)
        sync(list(model.parameters()))
        mean = [gradient / dist.get_world_size() for gradient in single]
        return [param.grad - m for param, m in zip(model.parameters(), mean, strict=True)]

    for differences in ranks.run(gradients):
        assert all(difference.abs().max() <= 1e-5 for difference in differences)


def train(ddp: type, dtype: torch.dtype):
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10)]
    wrapped = ddp(nn.Sequential(*layers).to(DEVICE), bucket_cap_mb=0.01)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast(DEVICE, dtype, enabled=dtype is not torch.float32):
            loss = wrapped(own_values(8, 64) + step).square().mean()
        loss.backward()
        optimizer.step()
    return [param.detach().clone() for param in wrapped.module.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_our_ddp_trains_as_pytorchs_does(ranks: Ranks, dtype: torch.dtype) -> None:
    ours, pytorchs = (ranks.run(train, ddp, dtype) for ddp in (DistributedDataParallel, TorchDDP))
    for replica in ours:
        torch.testing.assert_close(replica, ours[0], atol=0, rtol=0)  # the same to the last bit
        torch.testing.assert_close(replica, pytorchs[0], atol=2e-3, rtol=2e-3)


FAULTS = [
    (one_skips, (DeadlockError,)),
    (other_shape, (MismatchError,)),
    (one_raises, (RankError,)),
    (all_send_first, (DeadlockError, RankTimeout)),
]


@pytest.mark.parametrize(("program", "errors"), FAULTS, ids=lambda f: getattr(f, "__name__", ""))
def test_failures_are_explained_and_the_next_call_works(program, errors):
    def on_gpu() -> None:
        torch.set_default_device(DEVICE)  # the programs make their tensors without a device
        try:
            program()
        finally:
            torch.set_default_device(None)

    with Ranks(4, on=ON, timeout=20) as ranks:
        with pytest.raises(errors) as caught:
            ranks.run(on_gpu)
        assert "student_bugs.py, line" in str(caught.value)
        assert ranks.run(dist.get_rank) == [0, 1, 2, 3]


def test_a_trace_has_what_was_sent(ranks: Ranks) -> None:
    ranks.run(lambda: dist.all_reduce(torch.ones(1000, device=DEVICE)))
    for rank in range(ranks.world_size):
        assert ranks.trace.calls(rank) == {"all_reduce": 1}
    assert {event.bytes for event in ranks.trace.operations} == {4000}
