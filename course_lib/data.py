"""Data for the course: a real problem that needs no download.

    >>> from course_lib.data import digits
    >>> train, test = digits()
    >>> len(train), len(test)
    (1438, 359)

*Digits* are 1,797 handwritten digits of 8 x 8 pixels, which are part of scikit-learn. They are
small enough to train on a laptop in seconds, and real enough to reveal a wrong training loop.

Training and test sets are split once, from a seed. Every rank calls the same function with the same
seed, gets the same split, and only then takes its own shard (see `sharding`): nothing has to be
sent, and no rank ever trains on examples that another rank tests on.
"""

import torch
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
