"""The model in one process: a small transformer, dense or with experts, as a list of layers.

    >>> from course_lib.mesh import Shape, next_word_loss, transformer
    >>> model = transformer(Shape(layers=2, experts=4))
    >>> tokens = torch.zeros(8, 17, dtype=torch.long)
    >>> next_word_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()

    tokens (batch, length)
      → Embedding      words + positions                      (length, batch, width)
      → Block × L      x + attention(norm(x)), then x + feed_forward(norm(x))
      → Readout        norm, and a score for every word       (batch, length, words)

The model does not know about ranks. A layer takes one tensor and returns one, so a pipeline can cut
anywhere. Between layers the sequence is the first dimension, as tensor parallelism expects.

A. Vaswani et al., "Attention Is All You Need", NeurIPS 2017; W. Fedus et al., "Switch
Transformers", JMLR 2022 (experts in place of the MLP).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from course_lib.expert_parallel import mixture_of_experts


class Shape(NamedTuple):
    """The sizes of a model; heads, hidden units and experts may be any numbers."""

    words: int = 32
    length: int = 16
    width: int = 16
    heads: int = 4
    hidden: int = 64
    layers: int = 4
    experts: int = 0
    """E, the number of experts that replace the MLP in every block; 0: none."""
    top_k: int = 1


class Embedding(nn.Module):
    """From words, (batch, length), to (length, batch, width)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.words, shape.width)
        self.positions = nn.Parameter(0.1 * torch.randn(shape.length, 1, shape.width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the sum of the embeddings of each word and its position."""
        embedded: Tensor = self.words(tokens.t())
        return embedded + self.positions[: len(embedded)]


class Attention(nn.Module):
    """Self-attention, causal, on (length, batch, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.enter: Any = nn.Linear(width, 3 * width)
        self.leave: Any = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attended values of all heads, mixed."""
        # (length, batch, 3 · heads · size) → three of (batch, heads, length, size)
        apart = self.enter(x).unflatten(-1, (3, self.heads, self.size)).permute(2, 1, 3, 0, 4)
        queries, keys, values = apart.unbind()
        attended = scaled_dot_product_attention(queries, keys, values, is_causal=True)
        out: Tensor = self.leave(attended.permute(2, 0, 1, 3).flatten(2))
        return out


class MLP(nn.Module):
    """Two layers with gelu between; any leading dimensions."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.enter: Any = nn.Linear(width, hidden)
        self.leave: Any = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        out: Tensor = self.leave(gelu(self.enter(x)))
        return out


class Experts(nn.Module):
    """A router and E MLPs, of which each token uses `top_k`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.router = nn.Linear(shape.width, shape.experts)
        self.experts = nn.ModuleList(MLP(shape.width, shape.hidden) for _ in range(shape.experts))
        self.top_k = shape.top_k

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`; each token is processed by itself."""
        tokens = x.reshape(-1, x.shape[-1])
        return mixture_of_experts(tokens, self.router, list(self.experts), self.top_k).view(x.shape)


class Block(nn.Module):
    """Attention, then an MLP or experts, each with a skip connection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(shape.width) for _ in range(2))
        self.attention: nn.Module = Attention(shape.width, shape.heads)
        self.feed_forward: nn.Module = (
            Experts(shape) if shape.experts else MLP(shape.width, shape.hidden)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (length, batch, width)."""
        x = x + self.attention(self.norms[0](x))
        out: Tensor = x + self.feed_forward(self.norms[1](x))
        return out


class Readout(nn.Module):
    """From (length, batch, width) to the scores of all words, (batch, length, words)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.width)
        self.scores = nn.Linear(shape.width, shape.words, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return a score for each word, at each position of each text."""
        scores: Tensor = self.scores(self.norm(x))
        return scores.transpose(0, 1)


def transformer(shape: Shape) -> nn.Sequential:
    """Return the model: an embedding, `shape.layers` blocks, a readout. Set the seed before."""
    return nn.Sequential(
        Embedding(shape), *(Block(shape) for _ in range(shape.layers)), Readout(shape)
    )


def next_word_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of scores (batch, length, words) and words (batch, length)."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
