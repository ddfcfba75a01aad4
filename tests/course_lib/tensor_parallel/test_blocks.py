"""Tensor parallelism: forward, backward and training as on one process, and what it sends."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss, scaled_dot_product_attention

from course_lib import tensor_parallel
from course_lib.collectives import place_in
from course_lib.mesh.transformer import MLP
from course_lib.ranks import RankError
from course_lib.sharding import shard
from tests.helpers.ddp_scenarios import WORLDS

WIDTH, HIDDEN, HEADS, TOKENS, BATCH, STEPS = 15, 22, 5, 7, 2, 5


class Attention(nn.Module):
    """The same in one process, written apart."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        heads = [t.unflatten(-1, (HEADS, -1)).permute(1, 2, 0, 3) for t in self.qkv(x).chunk(3, -1)]
        attended = scaled_dot_product_attention(*heads)
        return self.out(attended.permute(2, 0, 1, 3).flatten(2))


class Layer(nn.Module):
    """A transformer layer: of one process, or of K ranks."""

    def __init__(self, parallel: bool, along_sequence: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.along_sequence = along_sequence
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        options = {"sequence_parallel": along_sequence}
        if parallel:
            blocks = [
                tensor_parallel.ParallelAttention(WIDTH, HEADS, **options),
                tensor_parallel.ParallelMLP(WIDTH, HIDDEN, **options),
            ]
        else:
            blocks = [Attention(), MLP(WIDTH, HIDDEN)]
        self.blocks = nn.ModuleList(blocks)
        self.double()

    def forward(self, x):
        args = (TOKENS,) if self.along_sequence else ()
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x), *args)
        return x


def data():
    g = torch.Generator().manual_seed(1)
    x, y = (torch.randn(TOKENS, BATCH, WIDTH, generator=g, dtype=torch.float64) for _ in range(2))
    return x, y


def train(layer: Layer):
    """Return the outputs after training, and the input's gradient of the first step."""
    x, y = data()
    part = shard if layer.along_sequence else lambda t, *_: t
    rank, k = place_in(None) if dist.is_initialized() else (0, 1)
    x_part, target = part(x, k, rank).clone().requires_grad_(), part(y, k, rank)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    gradient = torch.empty(0)
    shared = []
    if layer.along_sequence:
        shared = [*layer.norms.parameters(), *(block.leave.bias for block in layer.blocks)]
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step < 2)
        for factor in (0.25, 0.75):  # two backwards, and any number of sums after each
            (factor * mse_loss(layer(x_part), target, reduction="sum") / y.numel()).backward()
            for _ in range(step if shared else 0):
                tensor_parallel.sum_partial_gradients(shared)
        if shared:
            tensor_parallel.sum_partial_gradients(shared)
        if step == 0:
            gradient = x_part.grad.clone()
        optimizer.step()
    return layer(x_part).detach(), gradient


@pytest.mark.parametrize("along_sequence", [False, True])
@pytest.mark.parametrize(("on", "k"), WORLDS)
def test_a_layer_trains_as_in_one_process(ranks_of, on, k, along_sequence):
    results = ranks_of(on, k).run(lambda: train(Layer(True, along_sequence)))
    if along_sequence:  # each rank has its tokens
        results = [[torch.cat(parts) for parts in zip(*results, strict=True)]]
    for result in results:
        torch.testing.assert_close(list(result), list(train(Layer(False))), rtol=1e-9, atol=1e-11)


def wrong(case: str) -> None:
    if case == "heads":
        tensor_parallel.ParallelAttention(8, 3)
    tensor_parallel.ColumnParallelLinear(4, 4, sequence_parallel=True)(torch.ones(1, 4))


@pytest.mark.parametrize(
    ("case", "message"), [("heads", "heads=3 does not divide"), ("length", "number of tokens")]
)
def test_errors_say_what_is_missing(ranks_of, case, message):
    with pytest.raises(RankError, match=f"ValueError: .*{message}"):
        ranks_of("simulated", 2).run(wrong, case)


# --- a linear layer that is cut between ranks -----------------------------------------------------


IN, OUT = 5, 3  # fewer outputs than ranks, where there are four
MAKE = {0: tensor_parallel.column_parallel, 1: tensor_parallel.row_parallel}


def layer(bias: bool) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(IN, OUT, bias, dtype=torch.float64)


def numbers(*shape: int):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def gradients(linear: nn.Module, x, y, dy):
    """Return the gradients of a model in which x is also used beside the layer."""
    bias = [] if linear.bias is None else [linear.bias]
    loss = (y * dy).sum() + x.square().sum()
    return list(torch.autograd.grad(loss, [x, linear.weight, *bias]))


def one_process(bias: bool):
    linear, x = layer(bias), numbers(2, 4, IN).requires_grad_()
    y = linear(x)
    return y, gradients(linear, x, y, numbers(2, 4, OUT))


def linear_on_ranks(dim: int, bias: bool):
    rank, k, linear = dist.get_rank(), dist.get_world_size(), layer(bias)
    part = MAKE[dim](linear)
    assert part.weight.untyped_storage().data_ptr() != linear.weight.untyped_storage().data_ptr()
    x, dy = numbers(2, 4, IN), numbers(2, 4, OUT)
    if dim == 0:
        dy = dy.tensor_split(k, -1)[rank]
    else:
        x = x.tensor_split(k, -1)[rank]
    x = x.clone().requires_grad_()
    y = part(x)
    return y.detach(), gradients(part, x, y, dy)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dim", MAKE)
@pytest.mark.parametrize(("on", "k"), WORLDS)
def test_its_parts_are_those_of_one_process(ranks_of, on, k, dim, bias):
    output, (dx, dw, *db) = one_process(bias)
    for rank, results in enumerate(ranks_of(on, k).run(linear_on_ranks, dim, bias)):

        def own(tensor, along: int, rank: int = rank):
            return tensor.tensor_split(k, along)[rank]

        if dim == 0:
            right = own(output, -1), [dx, own(dw, 0), *(own(gradient, 0) for gradient in db)]
        else:
            right = output, [own(dx, -1), own(dw, 1), *db]
        torch.testing.assert_close(results, right)
