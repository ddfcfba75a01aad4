"""The three models of `training_step` and `sharding`, and a batch for each."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

TOKENS, CONTEXT = 256, 64


class Model(NamedTuple):
    """Functions that make a model, and a batch for it."""

    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]


def wide_mlp() -> nn.Module:
    """Return an MLP of few large tensors: 10.5 million parameters in 10."""
    widths = [784, 1760, 1760, 1760, 1760]
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 10))


def deep_mlp() -> nn.Module:
    """Return an MLP of many small tensors: 8.8 million parameters in 122."""
    layers: list[nn.Module] = []
    for _ in range(60):
        layers += [nn.Linear(380, 380), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(380, 10))


class Transformer(nn.Module):
    """A language model over bytes: 6 layers of width 384, 11 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 384)
        layer = nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(384, TOKENS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (batch x length, TOKENS)."""
        hidden = self.layers(self.embedding(tokens), mask=self.mask, is_causal=True)
        return self.head(hidden).flatten(0, 1)


def _images(width: int) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(32, width, generator=generator)
        return x, torch.randint(10, (32,), generator=generator)

    return batch


def _text(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(TOKENS, (4, CONTEXT + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:].flatten()


MODELS = {
    "wide MLP": Model(wide_mlp, _images(784)),
    "deep MLP": Model(deep_mlp, _images(380)),
    "transformer": Model(Transformer, _text),
}
