"""Three models, small enough for a laptop: an MLP and a CNN for digits, a transformer for text.

The transformer is that of `mesh`. None of them has BatchNorm: its statistics cover only the rows of
*one rank*, so a step on K ranks would differ from a step on one machine with the whole batch.
LayerNorm uses one example at a time.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from course_lib.mesh import Shape, transformer
from course_lib.train.config import TrainConfig

PIXELS = 8
"""Height and width of a digit."""
CLASSES = 10
"""The digits 0 to 9."""
VOCABULARY = 256
"""The transformer reads and predicts bytes."""


def build_model(config: TrainConfig) -> nn.Module:
    """Return the model that `config` names, initialised with PyTorch's current random numbers.

    `mlp` and `cnn` take images of shape (B, 64) and return logits of shape (B, 10); `transformer`
    takes bytes, integers of shape (B, T) with T <= context, and returns logits (B, T, 256).
    """
    if config.model == "mlp":
        return _mlp(config.width, config.layers)
    if config.model == "cnn":
        return _cnn(config.width, config.layers)
    sizes = {"width": config.width, "hidden": 4 * config.width, "heads": config.heads}
    return transformer(Shape(VOCABULARY, config.context, layers=config.layers, **sizes))


def _mlp(width: int, layers: int) -> nn.Module:
    sizes = [PIXELS * PIXELS, *[width] * layers]
    modules: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        modules += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*modules, nn.Linear(width, CLASSES))


def _cnn(channels: int, layers: int) -> nn.Module:
    sizes = [1, *[channels] * layers]
    modules: list[nn.Module] = [nn.Unflatten(1, (1, PIXELS, PIXELS))]
    for inputs, outputs in pairwise(sizes):
        modules += [nn.Conv2d(inputs, outputs, kernel_size=3, padding=1), nn.ReLU()]
    features = channels * (PIXELS // 2) ** 2
    return nn.Sequential(*modules, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(features, CLASSES))


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats, a scalar.

    Logits have the shape (…, classes). Targets are integers of shape (…).
    """
    # Compute in full precision: bf16 has only 8 significant bits, and people compare losses.
    flat = logits.flatten(0, -2)
    full = flat.float() if flat.dtype in (torch.bfloat16, torch.float16) else flat
    return F.cross_entropy(full, targets.flatten().long())
