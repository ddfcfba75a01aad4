"""Bias, variance and contraction: as the docstrings, and the papers, state them."""

import pytest
import torch

from course_lib.compression import Compressor, ErrorFeedback, OneBit, PowerSGD, RandomK, TopK
from tests.helpers.compressors import PLAIN, UNBIASED

TIMES = 4000


def samples(compressor: Compressor, x: torch.Tensor, times: int = TIMES) -> torch.Tensor:
    return torch.stack([compressor.decode(compressor.encode(x)) for _ in range(times)]).double()


@pytest.mark.parametrize("name", UNBIASED)
@pytest.mark.large
def test_right_on_average(name: str) -> None:
    """Every element's mean lies within five of its own standard errors."""
    x = torch.randn(150, generator=torch.Generator().manual_seed(3))
    drawn = samples(UNBIASED[name](), x)
    error = (drawn.mean(0) - x.double()).abs()
    standard_error = drawn.std(0) / TIMES**0.5
    assert (error <= 5 * standard_error + 1e-6).all(), (error / standard_error).max()


def test_the_variance_of_random_k() -> None:
    n, k = 200, 50
    x = torch.randn(n)
    errors = (samples(RandomK(k / n, unbiased=True), x) - x.double()).square().sum(1)
    expected = (n / k - 1) * x.double().square().sum()
    assert abs(errors.mean() - expected) <= 5 * errors.std() / TIMES**0.5


def test_the_contraction_of_top_k_and_of_one_bit() -> None:
    x = torch.randn(500).double()
    top, n = TopK(0.1), x.numel()
    left_out = (top.decode(top.encode(x)) - x).square().sum()
    assert left_out <= (1 - 0.1) * x.square().sum()
    signs = OneBit()
    left_out = (signs.decode(signs.encode(x)) - x).square().sum()
    expected = x.square().sum() - x.abs().sum() ** 2 / n
    torch.testing.assert_close(left_out, expected, rtol=1e-5, atol=0)


def test_power_iteration_comes_near_the_best() -> None:
    """Step by step, on the same matrix, to what the singular value decomposition leaves out."""
    matrix = torch.randn(40, 30, generator=torch.Generator().manual_seed(2))
    singular = torch.linalg.svdvals(matrix)
    best = singular[2:].square().sum().sqrt()
    compressor = PowerSGD(2)
    left_out = [
        float((compressor.decode(compressor.encode(matrix, "weight")) - matrix).norm())
        for _ in range(60)
    ]
    assert left_out[0] > left_out[5] > best * 0.999
    assert left_out[-1] <= best * 1.01


def test_power_sgd_finds_its_way_from_a_zero_gradient() -> None:
    compressor = PowerSGD(2)
    compressor.encode(torch.zeros(20, 10), "weight")
    product = torch.outer(torch.randn(20), torch.randn(10))
    decoded = compressor.decode(compressor.encode(product, "weight"))
    torch.testing.assert_close(decoded, product, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", PLAIN)
def test_with_feedback_the_sum_errs_by_one_step(name: str) -> None:
    """Σ C(p_t) = Σ x_t - e: the residual is all that is missing, however many steps there were."""
    compressor = ErrorFeedback(PLAIN[name]())
    sent, exact = torch.zeros(300), torch.zeros(300)
    for step in range(50):
        x = torch.randn(300, generator=torch.Generator().manual_seed(step))
        sent += compressor.decode(compressor.encode(x, "weights"))
        exact += x
    residual = compressor.residuals["weights"]
    torch.testing.assert_close(sent + residual, exact, rtol=1e-4, atol=1e-4)
    assert residual.norm() < 40 * 300**0.5
