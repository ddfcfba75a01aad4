"""Data for the course: one real problem and one with a known answer, neither downloaded.

    >>> from course_lib.data import digits
    >>> train, test = digits()
    >>> len(train), len(test)
    (1438, 359)

*Digits* are 1,797 handwritten digits of 8 x 8 pixels, which are part of scikit-learn. They are
small enough to train on a laptop in seconds, and real enough to reveal a wrong training loop.

*Linear regression* has a loss that is quadratic in w, so gradient, minimum and curvature are known
in closed form. Use it to check a statement to the last digit.

Training and test sets are split once, from a seed. Every rank calls the same function with the same
seed, gets the same split, and only then takes its own shard (see `sharding`): nothing has to be
sent, and no rank ever trains on examples that another rank tests on.
"""

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

_BRIGHTEST_PIXEL = 16.0  # the digits' pixels count the dark dots in a 4 x 4 square: 0 to 16


def digits(seed: int = 0, test_fraction: float = 0.2) -> tuple[TensorDataset, TensorDataset]:
    """Return scikit-learn's handwritten digits as `(train, test)`.

    Each is a `TensorDataset` of images, float32 of shape (N, 64) with values from 0 to 1, and
    labels, int64 of shape (N,) with values 0 to 9; `images, labels = train.tensors` returns both.
    Together, the two sets hold all 1,797 examples, each once, in an order that depends only on
    `seed`.

    Raises ValueError unless 0 <= test_fraction < 1.

    Data: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine
    Learning Repository, 1998 (its test part, which is what scikit-learn ships).
    """
    if not 0.0 <= test_fraction < 1.0:
        raise ValueError(
            f"test_fraction is {test_fraction}: give the share of examples to hold out, "
            "at least 0 and below 1 (0.2 holds out one in five)"
        )
    # Imported here because it takes seconds, and most of the course needs no digits.
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    images = torch.as_tensor(pixels, dtype=torch.float32) / _BRIGHTEST_PIXEL
    labels = torch.as_tensor(classes, dtype=torch.int64)

    # The file's own order is not random: its labels run 0, 1, 2, … 9 again and again.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    num_test = round(test_fraction * len(labels))
    test, train = order[:num_test], order[num_test:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def linear_regression(
    n: int,
    dim: int,
    noise: float = 0.1,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a linear regression problem: y = X w + noise * e, with X, w and e standard normal.

    Returns `(X, y, w)` of shapes (n, dim), (n,) and (dim,), in float64 unless `dtype` says
    otherwise, so that rounding does not hide the effect to be shown. With the loss
    F(w) = 1/n * sum_i (x_i . w - y_i)^2 the gradient is 2/n * X^T (X w - y).

    `torch.nn.Linear(dim, 1)` returns shape (n, 1): squeeze it to (n,) before the loss, or the
    difference with y is broadcast to (n, n).

    Raises ValueError if n or dim is below 1 or noise is negative.
    """
    if n < 1 or dim < 1 or noise < 0:
        raise ValueError(
            f"n and dim must be 1 or more, and noise, a standard deviation, 0 or more; got n={n}, "
            f"dim={dim}, noise={noise}"
        )
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, dim, dtype=dtype, generator=generator)
    w = torch.randn(dim, dtype=dtype, generator=generator)
    y = x @ w + noise * torch.randn(n, dtype=dtype, generator=generator)
    return x, y, w
