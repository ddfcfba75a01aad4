"""PyTorch's own tensor parallelism, on the same ranks with one model, gives the same weights."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import gelu, mse_loss

from course_lib.collectives import place_in
from course_lib.sharding import shard
from course_lib.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    sum_partial_gradients,
)
from tests.helpers.folding import over

WIDTH, HIDDEN, TOKENS, STEPS = 6, 12, 4, 5


class Net(nn.Module):
    """A norm and an MLP beside a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(WIDTH)
        self.enter: nn.Module = nn.Linear(WIDTH, HIDDEN)
        self.leave: nn.Module = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor, *length: int) -> Tensor:
        out: Tensor = x + self.leave(gelu(self.enter(self.norm(x), *length)))
        return out


def batches() -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(1)
    x, y = (torch.randn(STEPS, TOKENS, 3, WIDTH, generator=g) for _ in range(2))
    return list(zip(x, y, strict=True))


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)


def ours(along_sequence: bool) -> dict[str, Tensor]:
    net, (rank, k) = Net(), place_in(None)
    net.enter = ColumnParallelLinear.from_linear(net.enter, sequence_parallel=along_sequence)
    net.leave = RowParallelLinear.from_linear(net.leave, sequence_parallel=along_sequence)
    optimizer = optimizer_of(net)
    for x, y in batches():
        optimizer.zero_grad()
        mine, target = (shard(t, k, rank) if along_sequence else t for t in (x, y))
        out = net(mine, *((TOKENS,) if along_sequence else ()))
        (mse_loss(out, target, reduction="sum") / y.numel()).backward()
        if along_sequence:
            sum_partial_gradients([*net.norm.parameters(), net.leave.bias])
        optimizer.step()
    return {name: param.detach() for name, param in net.named_parameters()}


def theirs(along_sequence: bool) -> dict[str, Tensor]:
    rank, k = place_in(None)
    mesh = init_device_mesh("cpu", (k,))
    plan: dict[str, Any] = {"enter": ColwiseParallel(), "leave": RowwiseParallel()}
    if along_sequence:
        plan = {
            "norm": SequenceParallel(sequence_dim=0),
            "enter": ColwiseParallel(input_layouts=Shard(0)),
            "leave": RowwiseParallel(output_layouts=Shard(0)),
        }
        plan["leave"].use_local_output = plan["enter"].use_local_output = False
        plan[""] = PrepareModuleInput(
            input_layouts=Shard(0), desired_input_layouts=Shard(0), use_local_output=False
        )
    net = parallelize_module(Net(), mesh, plan)
    optimizer = optimizer_of(net)
    for x, y in batches():
        optimizer.zero_grad()
        out = net(shard(x, k, rank) if along_sequence else x)
        if along_sequence:
            out = out.redistribute(placements=[Replicate()]).to_local()
        (mse_loss(out, y, reduction="sum") / y.numel()).backward()
        optimizer.step()
    params = {name: param.detach() for name, param in net.named_parameters()}
    return {n: p.to_local() if isinstance(p, DTensor) else p for n, p in params.items()}


@over("along_sequence", [False, True])
def test_weights_are_those_of_parallelize_module(ranks_of, along_sequence):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ranks = ranks_of("cpu", 2)
        found, expected = (ranks.run(fn, along_sequence) for fn in (ours, theirs))
    for mine, other in zip(found, expected, strict=True):
        assert mine.keys() == other.keys()
        for name, weight in other.items():
            torch.testing.assert_close(mine[name], weight, rtol=1e-5, atol=1e-6, msg=name)
    assert not torch.equal(found[0]["norm.weight"], torch.ones(WIDTH))
