"""Mini-batch SGD against torch.optim.SGD, its variance against an enumeration of all batches."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from course_lib.sgd import (
    accumulate_gradients,
    batch_gradient,
    gradient_spread,
    gradient_variance,
    learning_rate,
    minibatches,
    sgd_step,
)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Linear(nn.Module):
    """x . w, of shape (n,), in float64: its gradient is known in closed form."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(dim, dtype=torch.float64, generator=generator(99)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w


def examples(n: int, dim: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = generator(seed)
    x = torch.randn(n, dim, dtype=torch.float64, generator=random)
    return x, torch.randn(n, dtype=torch.float64, generator=random)


def mse(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (prediction - target).square().mean()


# --- minibatches ------------------------------------------------------------------------------


@given(n=st.integers(0, 60), batch_size=st.integers(1, 70), seed=st.integers(0, 1000))
def test_an_epoch_visits_every_index_once(n, batch_size, seed):
    batches = list(minibatches(n, batch_size, generator(seed)))
    assert sorted(i for batch in batches for i in batch.tolist()) == list(range(n))
    assert all(len(batch) == batch_size for batch in batches[:-1])
    assert all(1 <= len(batch) <= batch_size for batch in batches)
    full = [batch for batch in batches if len(batch) == batch_size]
    kept = list(minibatches(n, batch_size, generator(seed), drop_last=True))
    assert len(kept) == n // batch_size == len(full)
    assert all(torch.equal(a, b) for a, b in zip(kept, full, strict=True))


@pytest.mark.parametrize(("n", "batch_size"), [(10, 0), (10, -1), (-1, 2)])
def test_wrong_sizes_are_refused_at_the_call(n, batch_size):
    with pytest.raises(ValueError, match="batch_size"):
        minibatches(n, batch_size)  # not only at the first batch


# --- the step ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("lr", [0.1, 1 / 3, 1e-3])
def test_step_equals_torch_sgd_bit_for_bit(dtype, lr):
    g = generator(1)
    ours = [nn.Parameter(torch.randn(shape, generator=g).to(dtype)) for shape in [(7, 5), (3,), ()]]
    torch_params = [nn.Parameter(p.detach().clone()) for p in ours]
    optimizer = torch.optim.SGD(torch_params, lr=lr)
    unused, storage = nn.Parameter(torch.ones(2)), ours[0].data_ptr()
    for _ in range(20):
        for p, q in zip(ours, torch_params, strict=True):
            p.grad = torch.randn(p.shape, generator=g).to(dtype)
            q.grad = p.grad.clone()
        before = [p.grad.clone() for p in ours]
        sgd_step(iter([*ours, unused]), lr)
        optimizer.step()
        for p, q, grad in zip(ours, torch_params, before, strict=True):
            assert torch.equal(p, q)
            assert torch.equal(p.grad, grad)  # gradients are left as they were
    assert unused.tolist() == [1.0, 1.0]
    assert ours[0].data_ptr() == storage and ours[0].requires_grad


# --- gradients in micro-batches, and the learning rate over rows --------------------------------


@pytest.mark.parametrize("micro_batch_size", [1, 3, 4, 7, 12])
@pytest.mark.parametrize("filled", [False, True])
def test_micro_batches_give_the_gradient_of_all_rows(micro_batch_size, filled):
    x, y = examples(7, 3, seed=1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1), nn.Flatten(0)).double()
    model[0].weight.requires_grad_(False)
    if filled:
        model[2].weight.grad = torch.ones_like(model[2].weight)
    loss = mse(model(x), y)
    trained = [param for param in model.parameters() if param.requires_grad]
    expected = torch.autograd.grad(loss, trained)
    sizes = []
    model.register_forward_pre_hook(lambda _, arguments: sizes.append(len(arguments[0])))
    assert accumulate_gradients(model, mse, x, y, micro_batch_size) == pytest.approx(loss.item())
    for param, gradient in zip(trained, expected, strict=True):
        torch.testing.assert_close(param.grad, gradient, rtol=1e-12, atol=1e-14)
    assert model[0].weight.grad is None
    assert sum(sizes) == 7
    assert max(sizes) <= micro_batch_size


@pytest.mark.parametrize(("warmup", "total"), [(6, 24), (1, 9), (0, 8), (6, 6), (7, 8)])
@pytest.mark.parametrize("batch", [1, 3, 8, 12])
def test_the_learning_rate_lies_on_torchs_curve_for_every_batch(warmup, total, batch):
    schedulers = torch.optim.lr_scheduler
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    schedule = schedulers.CosineAnnealingLR(optimizer, max(1, 2 * (total - warmup)))
    if warmup:  # it begins after the first half row
        rising = schedulers.LinearLR(optimizer, 0.5 / warmup, 1.0, 2 * warmup - 1)
        schedule = schedulers.SequentialLR(optimizer, [rising, schedule], [2 * warmup - 1])
    curve = []
    for _ in range(2 * total):  # a step of torch's schedule is half a row
        curve.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    rates = []
    for seen in range(0, total + batch, batch):
        halves = 2 * seen + batch
        rates.append(learning_rate(seen, batch, 0.3, warmup, total))
        expected = curve[halves - bool(warmup)] if halves < 2 * total else 0.0
        assert rates[-1] == pytest.approx(expected)
    if warmup % batch == total % batch == 0:
        assert batch * sum(rates) == pytest.approx(0.3 * total / 2)


# --- the gradient and its variance --------------------------------------------------------------


@given(n=st.integers(1, 12), dim=st.integers(1, 4), seed=st.integers(0, 100))
def test_batch_gradient_equals_the_closed_form(n, dim, seed):
    x, y = examples(n, dim, seed)
    model = Linear(dim)
    (gradient,) = batch_gradient(model, mse, x, y)
    expected = 2 / n * x.T @ (x @ model.w.detach() - y)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)
    assert model.w.grad is None


def test_batch_gradient_of_frozen_and_unused_parameters():
    model = nn.ModuleDict({"frozen": nn.Linear(2, 2), "unused": nn.Linear(3, 1)})
    model["frozen"].bias.requires_grad_(False)
    model.forward = lambda x: model["frozen"](x).sum(1)
    gradients = batch_gradient(model, mse, torch.ones(4, 2), torch.zeros(4))
    trained = [model["frozen"].weight, model["unused"].weight, model["unused"].bias]
    assert [g.shape for g in gradients] == [p.shape for p in trained]
    assert gradients[0].abs().sum() > 0
    assert all(g.abs().sum() == 0 for g in gradients[1:])


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_theory_is_exact_over_all_batches(n):
    """Over *all* subsets of size B, not a sample of them, the formula holds to rounding."""
    x, y = examples(n, 3, seed=n)
    model = Linear(3)
    (full,) = batch_gradient(model, mse, x, y)
    spread = gradient_spread(model, mse, x, y)
    for batch_size in range(1, n + 1):
        subsets = list(itertools.combinations(range(n), batch_size))
        distances = []
        for subset in subsets:
            (g,) = batch_gradient(model, mse, x[list(subset)], y[list(subset)])
            distances.append((g - full).square().sum().item())
        exact = sum(distances) / len(distances)
        theory = spread / batch_size * (n - batch_size) / max(1, n - 1)
        assert theory == pytest.approx(exact, rel=1e-10, abs=1e-20)


@pytest.mark.parametrize(("n", "batch_size"), [(5, 2), (4, 3), (3, 1), (6, 6)])
def test_the_measured_variance_is_that_of_theory(n, batch_size):
    x, y = examples(n, 3, seed=n)
    model = Linear(3)
    model.w.grad = torch.ones(3, dtype=torch.float64)
    draws = [
        gradient_variance(model, mse, x, y, batch_size, 4, generator(seed)) for seed in range(500)
    ]
    theory = gradient_spread(model, mse, x, y) / batch_size * (n - batch_size) / (n - 1)
    deviation = torch.tensor(draws, dtype=torch.float64).std().item() / len(draws) ** 0.5
    assert sum(draws) / len(draws) == pytest.approx(theory, abs=5 * deviation + 1e-12)
    assert draws[0] == gradient_variance(model, mse, x, y, batch_size, 4, generator(0))
    assert model.w.grad.tolist() == [1.0, 1.0, 1.0]
