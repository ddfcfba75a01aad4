"""The digits are complete, split once and alike everywhere; the regression has the known answer."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.data import digits, linear_regression


def sorted_rows(images: torch.Tensor, labels: torch.Tensor) -> list[list[float]]:
    return sorted(torch.cat([images * 16, labels[:, None].float()], dim=1).tolist())


@pytest.mark.parametrize("test_fraction", [0.0, 0.2, 0.5, 0.99])
def test_train_and_test_hold_every_digit_once(test_fraction):
    from sklearn.datasets import load_digits  # takes 2 s, of every worker if it stood at the top

    train, test = digits(test_fraction=test_fraction)
    assert len(test) == round(1797 * test_fraction)

    images = torch.cat([train.tensors[0], test.tensors[0]])
    labels = torch.cat([train.tensors[1], test.tensors[1]])
    pixels, classes = load_digits(return_X_y=True)
    expected = sorted_rows(torch.tensor(pixels).float() / 16, torch.tensor(classes))
    assert sorted_rows(images, labels) == expected


def test_dtypes_shapes_and_range():
    train, test = digits()
    for part in (train, test):
        images, labels = part.tensors
        assert images.dtype == torch.float32
        assert images.shape == (len(part), 64)
        assert images.min() == 0.0
        assert images.max() == 1.0
        assert labels.dtype == torch.int64
        assert labels.shape == (len(part),)
        assert labels.unique().tolist() == list(range(10))
    image, label = train[3]
    assert torch.equal(image, train.tensors[0][3])
    assert label == train.tensors[1][3]


@pytest.mark.parametrize("test_fraction", [-0.1, 1.0, 20.0])
def test_impossible_fraction_is_refused(test_fraction):
    with pytest.raises(ValueError, match="test_fraction"):
        digits(test_fraction=test_fraction)


@settings(max_examples=30)
@given(n=st.integers(1, 50), dim=st.integers(1, 8), seed=st.integers(0, 2**31))
def test_without_noise_the_true_w_fits_exactly(n, dim, seed):
    x, y, w = linear_regression(n, dim, noise=0.0, seed=seed)
    assert (x.shape, y.shape, w.shape) == ((n, dim), (n,), (dim,))
    assert x.dtype == y.dtype == w.dtype == torch.float64
    assert torch.equal(x @ w, y)


def test_least_squares_finds_w_up_to_the_noise():
    n, dim, noise = 20_000, 4, 0.5
    x, y, w = linear_regression(n, dim, noise, seed=3)
    solution = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    # The estimate's standard deviation is noise/√n in each direction: five of them.
    assert (solution - w).abs().max() < 5 * noise / n**0.5
    residual = (x @ w - y).std()
    assert abs(residual - noise) < 5 * noise / (2 * n) ** 0.5


@pytest.mark.parametrize(("n", "dim", "noise"), [(0, 1, 0.0), (1, 0, 0.0), (1, 1, -1.0)])
def test_impossible_regression_is_refused(n, dim, noise):
    with pytest.raises(ValueError, match="n and dim must be 1 or more"):
        linear_regression(n, dim, noise)
