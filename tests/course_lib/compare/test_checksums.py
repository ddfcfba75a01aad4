"""A flipped bit is found where replicas must be equal, and only there."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from course_lib.compare import checksum, compare_replicas, flip_bit
from course_lib.ddp import DistributedDataParallel
from course_lib.fully_sharded import FullyShardedDataParallel
from course_lib.sharded_optimizer import ShardedOptimizer
from tests.course_lib.compare.museum import adam, batch, mlp, own_batch, squared
from tests.helpers.carriers import ranks_on

BITS = (0, 11, 22, 23, 29, 30, 31)
NAMES = {"averaged gradient": "gradient of", "state": "state exp_avg of", "weight": "weight"}


def after_two_steps(place: str, bit: int, bad: int):
    """Flip a bit of rank `bad` in the first of two steps; compare."""
    model = mlp()
    ddp = DistributedDataParallel(model)
    optimizer, weight = adam(model), model[0].weight

    def flip(flipped: str, tensor) -> None:
        if (flipped, dist.get_rank(), step) == (place, bad, 0):
            flip_bit(tensor, bit, 5)

    disagreement = None
    for step in range(2):
        optimizer.zero_grad()
        squared(ddp, *own_batch(step)).backward()
        flip("averaged gradient", weight.grad)
        optimizer.step()
        flip("state", optimizer.state[weight]["exp_avg"])
        flip("weight", weight)
        disagreement = disagreement or compare_replicas(model, optimizer)
    return disagreement


@pytest.mark.parametrize("on", ["simulated", pytest.param("cpu", marks=pytest.mark.large)])
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("place", NAMES)
def test_a_flip_that_parts_the_replicas_names_the_rank(place, world_size, on):
    def all_bits():
        return [after_two_steps(place, bit, world_size - 1) for bit in BITS]

    for first, *others in zip(*ranks_on(on, world_size).run(all_bits), strict=True):
        assert all(other == first for other in others)  # all ranks are told the same
        assert first is not None and first.name == f"{NAMES[place]} 0.weight"
        if world_size == 2:
            assert first.ranks == [0, 1] and "no majority" in str(first)
        else:
            assert first.ranks == [world_size - 1] and f"on rank {world_size - 1}" in str(first)


def test_a_group_names_ranks_as_the_world_does() -> None:
    def in_a_group():
        group = dist.new_group([1, 2, 3])
        model = mlp()
        if dist.get_rank() == 2:
            flip_bit(model[3].bias, 3)
        return compare_replicas(model, group=group) if dist.get_rank() else None

    outside, *inside = ranks_on("simulated", 4).run(in_a_group)
    assert outside is None
    assert all(disagreement is not None and disagreement.ranks == [2] for disagreement in inside)


def sharded_run(how: str, bad: int | None = None):
    """Compare after backward, after the step, and after a flip on rank `bad` of the group."""
    model, group = mlp(), dist.group.WORLD
    if how == "hybrid":  # each two ranks share a replica
        mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2))
        group = mesh.get_group(0)
        wrapped = FullyShardedDataParallel(model, group=mesh.get_group(1))
        optimizer: torch.optim.Optimizer = adam(wrapped)
    else:
        wrapped = DistributedDataParallel(model) if how == "averaged" else model
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, gradients=how, lr=0.01)
    disagreements = []
    for step in range(2):
        optimizer.zero_grad()
        squared(wrapped, *own_batch(step)).backward()
        if how == "hybrid":
            for param in wrapped.parameters():
                dist.all_reduce(param.grad, group=group)
        disagreements.append(compare_replicas(wrapped, optimizer, group))
        optimizer.step()
        disagreements.append(compare_replicas(wrapped, optimizer, group))
    if dist.get_rank(group) == bad:
        flip_bit(next(p for p in model.parameters() if p.numel()).data, 3)
    return [*disagreements, compare_replicas(wrapped, optimizer, group)]


@pytest.mark.parametrize("how", ["averaged", "local", "sharded", "hybrid"])
def test_sharded_runs_that_are_right_agree_and_a_flip_parts_them(how: str) -> None:
    ranks = ranks_on("simulated", 4)
    assert ranks.run(sharded_run, how) == [[None] * 5] * 4
    for *right, last in ranks.run(sharded_run, how, 1):
        assert right == [None] * 4
        assert last is not None and last.name.startswith("weight")
        assert last.world_size == (2 if how == "hybrid" else 4)


@pytest.mark.parametrize("on", ["simulated", "cpu"])
@pytest.mark.parametrize("bad", [0, 2])
def test_a_state_or_a_gradient_that_a_rank_lacks_is_a_difference(on: str, bad: int) -> None:
    def lacking(kind: str):
        model = mlp()
        optimizer = adam(model)
        model(batch()[0]).sum().backward()
        optimizer.step()
        if dist.get_rank() == bad and kind == "state":
            del optimizer.state[model[0].bias]
        elif dist.get_rank() == bad:
            model[0].bias.grad = None
        return compare_replicas(model, optimizer)

    for kind, name in (("state", "state step of 0.bias"), ("gradient", "gradient of 0.bias")):
        for disagreement in ranks_on(on, 3).run(lacking, kind):
            assert (disagreement.name, disagreement.ranks) == (name, [bad])


@given(
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.bool]),
    bit=st.integers(0, 63),
    index=st.integers(0, 5),
)
def test_any_one_bit_changes_the_sum_and_twice_is_none(dtype, bit, index):
    x = torch.randn(2, 3).to(dtype)
    bit %= 1 if dtype == torch.bool else 8 * x.element_size()
    before, checksum_before = x.clone(), checksum(x)
    flip_bit(x, bit, index)
    changed = (x != before).flatten() | x.isnan().flatten()
    assert checksum(x) != checksum_before
    assert changed.nonzero().flatten().tolist() in ([index], [])
    flip_bit(x, bit, index)
    assert torch.equal(x, before) and checksum(x) == checksum_before
