"""Tensor parallelism: forward, backward and training as on one process, and what it sends."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import gelu, mse_loss, scaled_dot_product_attention

from course_lib.collectives import place_in
from course_lib.ranks import RankError
from course_lib.sharding import shard
from course_lib.tensor_parallel import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelMLP,
    RowParallelLinear,
    sum_partial_gradients,
)
from tests.helpers.ddp_scenarios import WORLDS

WIDTH, HIDDEN, HEADS, TOKENS, BATCH, STEPS = 15, 22, 5, 7, 2, 5


class Attention(nn.Module):
    """The same in one process, written apart."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.causal = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            causal,
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = [t.unflatten(-1, (HEADS, -1)).permute(1, 2, 0, 3) for t in self.qkv(x).chunk(3, -1)]
        seen = scaled_dot_product_attention(*heads, is_causal=self.causal)
        out: Tensor = self.out(seen.permute(2, 0, 1, 3).flatten(2))
        return out


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.leave(gelu(self.enter(x)))
        return out


class Layer(nn.Module):
    """A transformer layer: of one process, or of K ranks."""

    def __init__(self, parallel: bool, along_sequence: bool = False, causal: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.along_sequence = along_sequence
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        options = {"sequence_parallel": along_sequence}
        self.blocks = nn.ModuleList(
            [
                ParallelAttention(WIDTH, HEADS, causal=causal, **options),
                ParallelMLP(WIDTH, HIDDEN, **options),
            ]
            if parallel
            else [Attention(causal), MLP()]
        )
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        args = (TOKENS,) if self.along_sequence else ()
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x), *args)
        return x


def data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    x, y = (torch.randn(TOKENS, BATCH, WIDTH, generator=g, dtype=torch.float64) for _ in range(2))
    return x, y


def train(layer: Layer) -> tuple[Tensor, Tensor]:
    """Return the outputs after training, and the input's gradient of the first step."""
    x, y = data()
    part = shard if layer.along_sequence else lambda t, *_: t
    rank, k = place_in(None) if dist.is_initialized() else (0, 1)
    mine, target = part(x, k, rank).clone().requires_grad_(), part(y, k, rank)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    gradient = torch.empty(0)
    for step in range(STEPS):
        optimizer.zero_grad()
        (mse_loss(layer(mine), target, reduction="sum") / y.numel()).backward()
        if step == 0:
            assert mine.grad is not None
            gradient = mine.grad.clone()
        if layer.along_sequence:
            biases = [block.leave.bias for block in layer.blocks]
            sum_partial_gradients([*layer.norms.parameters(), *biases])
        optimizer.step()
    return layer(mine).detach(), gradient


def on_ranks(along_sequence: bool, causal: bool) -> Any:
    return train(Layer(True, along_sequence, causal))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("on", "k"), WORLDS)
def test_a_layer_trains_as_in_one_process(ranks_of, on, k, causal):
    expected, gradient = train(Layer(False, causal=causal))
    for out, grad in ranks_of(on, k).run(on_ranks, False, causal):
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(grad, gradient, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("on", "k"), WORLDS)
def test_along_the_sequence_each_rank_has_its_tokens(ranks_of, on, k):
    expected, gradient = train(Layer(False))
    results = ranks_of(on, k).run(on_ranks, True, True)
    outs, grads = (torch.cat(parts) for parts in zip(*results, strict=True))
    torch.testing.assert_close(outs, expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(grads, gradient, rtol=1e-9, atol=1e-11)


# --- linear -----------------------------------------------------------------------------------


def linear_gradients(rows: bool, bias: bool) -> Any:
    torch.manual_seed(3)
    rank, k = place_in(None)
    cls = RowParallelLinear if rows else ColumnParallelLinear
    layer = cls(7, 5, bias).double()
    x, y = inputs()
    mine = (shard(x.t(), k, rank).t() if rows else x).clone().requires_grad_()
    out = layer(mine)
    weighted = out * (y if rows else shard(y.t(), k, rank).t())
    weighted.sum().backward()
    assert layer.weight.grad is not None and mine.grad is not None
    b = layer.bias.grad if layer.bias is not None else None
    return out.detach(), mine.grad, layer.weight.grad, b


def inputs() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(2)
    x, y = (torch.randn(3, n, generator=g, dtype=torch.float64) for n in (7, 5))
    return x, y


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 6])
def test_a_linear_layer_is_the_whole_one_cut_up(ranks_of, k, rows, bias):
    torch.manual_seed(3)
    whole = nn.Linear(7, 5, bias).double()
    x, y = inputs()
    x.requires_grad_()
    out = whole(x)
    (out * y).sum().backward()
    outs, grads, weights, biases = zip(
        *ranks_of("simulated", k).run(linear_gradients, rows, bias), strict=True
    )
    assert x.grad is not None and whole.weight.grad is not None
    expected: Tensor = out.detach()
    for rank in range(k):
        torch.testing.assert_close(
            outs[rank], expected if rows else shard(expected.t(), k, rank).t()
        )
        torch.testing.assert_close(grads[rank], shard(x.grad.t(), k, rank).t() if rows else x.grad)
    torch.testing.assert_close(torch.cat(weights, 1 if rows else 0), whole.weight.grad)
    if bias:
        found = biases[0] if rows else torch.cat(biases)
        torch.testing.assert_close(found, whole.bias.grad)


# --- what is sent, and held -------------------------------------------------------------------


def wrong(what: str) -> None:
    if what == "heads":
        ParallelAttention(8, 3)
    ColumnParallelLinear(4, 4, sequence_parallel=True)(torch.ones(1, 4))


@pytest.mark.parametrize(
    ("what", "said"), [("heads", "heads=3 does not divide"), ("length", "number of tokens")]
)
def test_errors_say_what_is_missing(ranks_of, what, said):
    with pytest.raises(RankError, match=f"ValueError: .*{said}"):
        ranks_of("simulated", 2).run(wrong, what)
