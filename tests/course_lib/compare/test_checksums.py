"""A flipped bit is found where replicas must be equal, and only there."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from course_lib.compare import Disagreement, checksum, compare_replicas, flip_bit
from course_lib.ddp import DistributedDataParallel
from course_lib.ranks import Ranks
from tests.course_lib.compare.museum import adam, mine, mlp

BITS = (0, 11, 22, 23, 29, 30, 31)
FOUND = {"averaged gradient": "gradient of", "state": "state exp_avg of", "weight": "weight"}
HIDDEN = ("nothing", "activation", "local gradient")


@functools.cache
def ranks_of(world_size: int, on: str) -> Ranks:
    return Ranks(world_size, on=on)  # type: ignore[arg-type]


def after_two_steps(place: str, bit: int, bad: int) -> tuple[Disagreement | None, list[Tensor]]:
    """Flip a bit of rank `bad` in the first of two steps; compare, and return the weights."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = mlp()
    ddp = DistributedDataParallel(model)
    optimizer, weight = adam(model), model[0].weight

    def flip(where: str, tensor: Tensor) -> None:
        if (where, rank, step) == (place, bad, 0):
            flip_bit(tensor, bit, 5)

    model[0].register_forward_hook(lambda layer, x, out: flip("activation", out))
    weight.register_hook(lambda grad: flip("local gradient", grad))
    found = None
    for step in range(2):
        optimizer.zero_grad()
        x, y = mine(rank, world_size, step)
        nn.functional.mse_loss(ddp(x), y).backward()
        flip("averaged gradient", weight.grad)
        optimizer.step()
        flip("state", optimizer.state[weight]["exp_avg"])
        flip("weight", weight)
        found = found or compare_replicas(model, optimizer)
    return found, [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("on", ["simulated", pytest.param("cpu", marks=pytest.mark.large)])
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("place", FOUND)
def test_a_flip_that_parts_the_replicas_names_the_rank(
    place: str, world_size: int, on: str
) -> None:
    def every_bit() -> list[Disagreement | None]:
        return [after_two_steps(place, bit, world_size - 1)[0] for bit in BITS]

    for by_rank in zip(*ranks_of(world_size, on).run(every_bit), strict=True):
        assert all(each == by_rank[0] for each in by_rank)  # all ranks are told the same
        (found, *_) = by_rank
        assert found is not None and found.name == f"{FOUND[place]} 0.weight"
        if world_size == 2:
            assert found.ranks == [0, 1] and "no majority" in str(found)
        else:
            assert found.ranks == [world_size - 1] and f"on rank {world_size - 1}" in str(found)


@pytest.mark.parametrize("on", ["simulated", pytest.param("cpu", marks=pytest.mark.large)])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_flip_before_the_all_reduce_is_in_all_replicas(world_size: int, on: str) -> None:
    def each_place() -> list[tuple[Disagreement | None, list[Tensor]]]:
        return [after_two_steps(place, 22, world_size - 1) for place in HIDDEN]

    for by_place in ranks_of(world_size, on).run(each_place):
        assert all(found is None for found, _ in by_place)
        right, *wrong = [weights for _, weights in by_place]
        for weights in wrong:  # and it is not harmless
            assert not torch.equal(weights[0], right[0])


def test_a_group_names_ranks_as_the_world_does() -> None:
    def in_a_group() -> Disagreement | None:
        group = dist.new_group([1, 2, 3])
        model = mlp()
        if dist.get_rank() == 2:
            flip_bit(model[3].bias, 3)
        return compare_replicas(model, group=group) if dist.get_rank() else None

    outside, *inside = ranks_of(4, "simulated").run(in_a_group)
    assert outside is None
    assert all(each is not None and each.ranks == [2] for each in inside)


@given(
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.bool]),
    bit=st.integers(0, 63),
    index=st.integers(0, 5),
)
def test_any_one_bit_changes_the_sum_and_twice_is_none(
    dtype: torch.dtype, bit: int, index: int
) -> None:
    x = torch.randn(2, 3).to(dtype)
    bit %= 1 if dtype == torch.bool else 8 * x.element_size()
    before, whole = x.clone(), checksum(x)
    flip_bit(x, bit, index)
    changed = (x != before).flatten() | x.isnan().flatten()
    assert checksum(x) != whole and changed.nonzero().flatten().tolist() in ([index], [])
    flip_bit(x, bit, index)
    assert torch.equal(x, before) and checksum(x) == whole
