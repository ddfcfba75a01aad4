"""Many copies of one small classifier of digits, trained side by side as one tensor.

    >>> from course_lib.many_models import classifiers, scores
    >>> from course_lib.data import digits
    >>> images, labels = digits()[0].tensors
    >>> w = classifiers(seeds=5)  # five models, a row each
    >>> scores(w, images[:3]).shape
    torch.Size([5, 3, 10])

To tune an algorithm one trains the same model with several learning rates and seeds. Each model
here has 2,410 weights: 64 inputs, 32 hidden units, 10 classes. A step of a model that small is
nearly all overhead, so all models in one tensor take little longer than one.
"""

import torch
from torch import Tensor, nn

HIDDEN = 32
"""Hidden units of each model."""


def classifiers(seeds: int) -> Tensor:
    """Return the first weights of `seeds` models, of shape (seeds, 2410)."""
    rows = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        first, last = nn.Linear(64, HIDDEN), nn.Linear(HIDDEN, 10)
        pieces = first.weight.T, first.bias, last.weight.T, last.bias
        rows.append(torch.cat([piece.detach().flatten() for piece in pieces]))
    return torch.stack(rows)


def scores(w: Tensor, images: Tensor) -> Tensor:
    """Return the scores, of shape (…, rows, 10), of models with weights `w` of shape (…, 2410).

    `images` has shape (rows, 64), the same for all models, or (…, rows, 64).
    """
    first, bias, last, end = torch.split(w, [64 * HIDDEN, HIDDEN, HIDDEN * 10, 10], dim=-1)
    models = w.shape[:-1]
    hidden = torch.tanh(images @ first.reshape(*models, 64, HIDDEN) + bias.unsqueeze(-2))
    return hidden @ last.reshape(*models, HIDDEN, 10) + end.unsqueeze(-2)


def losses(w: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of each model on its rows, of shape (…).

    `labels` has shape (rows,) or (…, rows).
    """
    predictions = scores(w, images)
    right = labels.expand(predictions.shape[:-1])
    row_losses = nn.functional.cross_entropy(
        predictions.flatten(0, -2), right.flatten(), reduction="none"
    )
    return row_losses.view(right.shape).mean(-1)


def gradients(w: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient of each model's own loss, of the shape of `w`."""
    w = w.detach().requires_grad_()
    return torch.autograd.grad(losses(w, images, labels).sum(), w)[0]
