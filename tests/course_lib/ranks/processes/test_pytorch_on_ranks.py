"""PyTorch's own parallelism gives the same numbers on metered ranks as on plain gloo."""

import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib.ranks import Ranks
from tests.helpers.training import train


@pytest.fixture(scope="module", params=[1, 2, 3])
def both(request: pytest.FixtureRequest) -> Iterator[tuple[Ranks, Ranks]]:
    k = request.param
    with Ranks(k, on="cpu") as metered, Ranks(k, on="cpu", metered=False) as plain:
        yield metered, plain


def same(both: tuple[Ranks, Ranks], fn: object) -> Ranks:
    metered, plain = both
    ours, theirs = metered.run(fn), plain.run(fn)  # type: ignore[arg-type]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    return metered


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


@pytest.mark.parametrize("by_world_size", [True, False])
def test_ddp_with_uneven_inputs(both: tuple[Ranks, Ranks], by_world_size: bool) -> None:
    def program() -> list[torch.Tensor]:
        net = nn.parallel.DistributedDataParallel(model())
        with net.join(divide_by_initial_world_size=by_world_size):
            train(net, 2 + dist.get_rank())
        return [param.detach() for param in net.parameters()]

    same(both, program)


def test_fsdp2_and_its_full_tensors(both: tuple[Ranks, Ranks]) -> None:
    def program() -> list[torch.Tensor]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        net = model()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(net[0], mesh=mesh)
        fully_shard(net, mesh=mesh)
        train(net, 3)
        return [param.full_tensor().detach() for param in net.parameters()]  # type: ignore[attr-defined]

    ranks = same(both, program)
    if ranks.world_size > 1:
        assert {"all_gather", "reduce_scatter"} <= ranks.trace.calls(0).keys()


def test_functional_collectives(both: tuple[Ranks, Ranks]) -> None:
    def program() -> list[torch.Tensor]:
        from torch.distributed import _functional_collectives as functional

        k, world = dist.get_world_size(), dist.group.WORLD
        x = torch.arange(2.0 * k) + 10 * dist.get_rank()
        warnings.simplefilter("ignore", FutureWarning)  # names that older releases know
        several = functional.all_gather_into_tensor_coalesced([x, x + 1, x + 2], world)
        one = functional.all_gather_tensor(x, 0, world)
        total = functional.all_reduce(x, "sum", world)
        return [each + 0 for each in (total, one, *several)]

    same(both, program)
