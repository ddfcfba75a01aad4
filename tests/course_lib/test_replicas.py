"""K replicas and central averaging against one model and the whole batch.

Replicas on one CPU compute what replicas on K GPUs would, and each holds different data. In float64
the two sides must agree to a relative 1e-12, in float32 to 1e-5: the sums are the same, only added
up in a different order.
"""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from course_lib.data import digits
from course_lib.replicas import (
    average_gradients,
    data_parallel_gradients,
    data_parallel_step,
    replicate,
)
from course_lib.sgd import sgd_step

WORLD_SIZES = [1, 2, 3, 4]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def model_of(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10)).to(dtype)


def batch_of(size: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = digits()[0].tensors
    return images[:size].to(dtype), labels[:size]


def assert_same(replicas: list[nn.Module]) -> None:
    """Assert that parameters and gradients of all replicas are equal bit for bit."""
    for replica in replicas[1:]:
        for p, q in zip(replicas[0].parameters(), replica.parameters(), strict=True):
            assert torch.equal(p.cpu(), q.cpu())
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or torch.equal(p.grad.cpu(), q.grad.cpu())


# --- replicate ------------------------------------------------------------------------------------


def test_replicas_are_equal_and_share_nothing():
    master = model_of()
    replicas = replicate(master, ["cpu"] * 3)
    assert_same([master, *replicas])
    pointers = {p.data_ptr() for model in [master, *replicas] for p in model.parameters()}
    assert len(pointers) == 4 * len(list(master.parameters()))


def test_impossible_batches_are_refused():
    replicas = replicate(model_of(), ["cpu"] * 2)
    x, y = batch_of(4)
    for batch in [(x[:0], y[:0]), (x, y[:3])]:
        with pytest.raises(ValueError, match="one target for each"):
            data_parallel_gradients(replicas, cross_entropy, *batch)
    with pytest.raises(ValueError, match="no replicas"):
        data_parallel_gradients([], cross_entropy, x, y)
    with pytest.raises(ValueError, match="one weight for each"):
        average_gradients(replicas, [1.0])


# --- the step ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_training_follows_that_of_one_big_batch(world_size, dtype):
    master = model_of(dtype)
    replicas = replicate(master, ["cpu"] * world_size)
    images, labels = batch_of(60, dtype)
    sizes = [7, 17, 3, 2, 1, 30]
    start = 0
    for size in sizes:
        x, y = images[start : start + size], labels[start : start + size]
        start += size
        loss = data_parallel_step(replicas, cross_entropy, x, y, lr=0.5)

        master.zero_grad()
        expected = cross_entropy(master(x), y)
        expected.backward()
        sgd_step(master.parameters(), lr=0.5)

        tolerance = 10 * TOLERANCE[dtype]  # of which each step adds its part
        assert loss == pytest.approx(expected.item(), rel=tolerance)
        assert_same(replicas)
        for p, q in zip(replicas[0].parameters(), master.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)
    assert not torch.equal(next(master.parameters()), next(model_of(dtype).parameters()))
