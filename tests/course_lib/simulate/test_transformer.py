"""The counts of a transformer beside those of a real one, counted by PyTorch."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from course_lib.simulate import Transformer

BATCH = 2


class Layer(nn.Module):
    """One layer as the table has it: grouped keys, plain or gated MLP, explicit attention."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.shape = shape
        self.keys = shape.width * (shape.kv_heads or shape.heads) // shape.heads
        self.into = nn.Linear(shape.width, shape.width + 2 * self.keys, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        gates = 2 if shape.gated else 1
        self.up = nn.Linear(shape.width, gates * shape.mlp_width, bias=False)
        self.down = nn.Linear(shape.mlp_width, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.shape.heads
        q, k, v = self.into(x).split([self.shape.width, self.keys, self.keys], -1)
        q = q.unflatten(-1, (heads, -1)).transpose(1, 2)
        groups = heads // (self.shape.kv_heads or heads)
        k, v = (
            matrix.unflatten(-1, (heads // groups, -1)).transpose(1, 2).repeat_interleave(groups, 1)
            for matrix in (k, v)
        )
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        x = self.out((scores @ v).transpose(1, 2).flatten(-2))
        up = self.up(x)
        if self.shape.gated:
            gate, up = up.chunk(2, -1)
            up = gate.sigmoid() * up
        return self.down(up)


SHAPES = [
    Transformer(layers=3, width=64, heads=4, vocabulary=100, sequence=16),
    Transformer(layers=2, width=96, heads=6, vocabulary=51, sequence=8, kv_heads=2),
    Transformer(3, 64, 8, 77, sequence=32, hidden=160, kv_heads=4, gated=True, tied=False),
]


@pytest.mark.parametrize("shape", SHAPES, ids=["plain", "grouped", "gated"])
def test_parameters_and_operations_are_those_that_pytorch_counts(shape: Transformer) -> None:
    layer = Layer(shape)
    assert sum(p.numel() for p in layer.parameters()) == shape.layer_parameters
    with FlopCounterMode(display=False) as counter:
        y = layer(torch.ones(BATCH, shape.sequence, shape.width, requires_grad=True))
    assert counter.get_total_flops() == shape.layer_flops(BATCH)[0]
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    assert backward.get_total_flops() == 2 * shape.layer_flops(BATCH)[0]
    embedding, output = nn.Embedding(shape.vocabulary, shape.width), shape.embedding_parameters
    ends = embedding.weight.numel() + (0 if shape.tied else output)
    assert shape.parameters == shape.layers * shape.layer_parameters + ends


def test_activations_are_those_of_the_paper() -> None:
    """V. Korthikanti et al., 2022, table 2: sbh (34 + 5 as/h), and what t ranks divide."""
    s, b, h, a, t = 2048, 4, 6144, 64, 8
    shape = Transformer(48, h, a, 51200, s)
    scores = 5 * a * s / h
    assert shape.activation_bytes(b, 1, False) == pytest.approx(s * b * h * (34 + scores))
    divided = s * b * h * (10 + 24 / t + scores / t)
    assert shape.activation_bytes(b, t, False) == pytest.approx(divided)
    assert shape.activation_bytes(b, t, True) == pytest.approx(s * b * h * (34 + scores) / t)
