"""The digits are complete, split once and alike everywhere."""

import torch

from course_lib.data import digits


def sorted_rows(images: torch.Tensor, labels: torch.Tensor) -> list[list[float]]:
    return sorted(torch.cat([images * 16, labels[:, None].float()], dim=1).tolist())


def test_train_and_test_hold_every_digit_once():
    from sklearn.datasets import load_digits  # takes 2 s, of every worker if it stood at the top

    train, test = digits()
    assert len(test) == round(1797 * 0.2)

    images = torch.cat([train.tensors[0], test.tensors[0]])
    labels = torch.cat([train.tensors[1], test.tensors[1]])
    pixels, classes = load_digits(return_X_y=True)
    expected = sorted_rows(torch.tensor(pixels).float() / 16, torch.tensor(classes))
    assert sorted_rows(images, labels) == expected
