"""Mistakes that no project is known for: each pattern is read from numbers, in bfloat16 too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from course_lib.compare import Record, compare, record, trusted_run
from course_lib.gradient_sync import sync_flat
from course_lib.ranks import Ranks
from tests.course_lib.compare.museum import adam, all_reduce, gradients, mine, mlp, one_rank, sgd

MICRO = 3
Change = Callable[[nn.Module, int], None]
"""What a rank does with its gradients, given the number of the backward (-1: after all)."""


@functools.cache
def simulated(world_size: int) -> Ranks:
    return Ranks(world_size, on="simulated", misuse="ignore")


def first_of(
    change: Change,
    world_size: int,
    dtype: torch.dtype = torch.float32,
    micro: int = 1,
    **options: object,
) -> tuple[str, str] | None:
    """Return kind and label of the first difference, if `change` is done with the gradients."""

    def step() -> Record:
        model = mlp().to(dtype)
        optimizer = options.get("optimizer", sgd)(model)  # type: ignore[operator]
        with record(model, optimizer) as recorded:
            x, y = (each.to(dtype) for each in mine(dist.get_rank(), world_size))
            for i, (a, b) in enumerate(zip(x.chunk(micro), y.chunk(micro), strict=True)):
                (mse_loss(model(a), b) / micro).backward()
                change(model, i)
            change(model, -1)
            optimizer.step()
        return recorded

    trusted = trusted_run(lambda: one_rank(dtype=dtype, **options))  # type: ignore[arg-type]
    first = compare(trusted, simulated(world_size).run(step)).first
    return None if first is None else (first.key.kind, first.label)


def at_the_end(function: Callable[[nn.Module], None]) -> Change:
    return lambda model, i: function(model) if i == -1 else None


def synchronized(model: nn.Module) -> None:
    sync_flat(model.parameters())


def summed(model: nn.Module) -> None:
    all_reduce(gradients(model))


def divided_again(model: nn.Module) -> None:
    synchronized(model)
    for each in gradients(model):
        each.div_(dist.get_world_size())


def without_rank_1(model: nn.Module) -> None:
    if dist.get_rank() == 1:
        for each in gradients(model):
            each.zero_()
    synchronized(model)


def of_rank_0(model: nn.Module) -> None:
    for each in gradients(model):
        dist.broadcast(each, 0)


def largest(model: nn.Module) -> None:
    for each in gradients(model):
        dist.all_reduce(each, op=dist.ReduceOp.MAX)


def never_copied_back(model: nn.Module) -> None:
    flat = torch.cat([each.flatten() for each in gradients(model)])
    dist.all_reduce(flat)


def in_bfloat16(model: nn.Module) -> None:
    for each in gradients(model):
        low: Tensor = (each / dist.get_world_size()).bfloat16()
        dist.all_reduce(low)
        each.copy_(low)


def at_the_first(model: nn.Module, i: int) -> None:
    if i == 0:
        synchronized(model)


PATTERNS: list[tuple[Change, str, int]] = [
    (at_the_end(summed), "times K", 1),
    (at_the_end(divided_again), "divided by K", 1),
    (at_the_end(lambda _: None), "no all-reduce", 1),
    (at_the_end(without_rank_1), "rank missing", 1),
    (at_the_end(of_rank_0), "rank missing", 1),
    (at_the_end(never_copied_back), "no all-reduce", 1),
    (at_the_first, "reduced too early", MICRO),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(("change", "label", "micro"), PATTERNS)
def test_a_pattern_is_named(
    change: Change, label: str, micro: int, world_size: int, dtype: torch.dtype
) -> None:
    assert first_of(change, world_size, dtype, micro) == ("gradient", label)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_right_one_is_not(world_size: int, dtype: torch.dtype) -> None:
    assert first_of(at_the_end(synchronized), world_size, dtype, micro=2) is None


def test_micro_batches_of_unequal_size() -> None:
    """The 8 rows of each of three ranks are 3, 3 and 2; their means count the same."""
    found = first_of(at_the_end(synchronized), 3, micro=3)
    assert found == ("gradient", "mean of means")


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_sum_is_found_though_adam_hides_it(world_size: int) -> None:
    """Adam's first update is the same for a gradient of any length; its state is not."""
    found = first_of(at_the_end(summed), world_size, optimizer=adam)
    assert found == ("gradient", "times K")


@pytest.mark.parametrize(("change", "label"), [(largest, "not a mean"), (in_bfloat16, "rounding")])
def test_other_reductions(change: Callable[[nn.Module], None], label: str) -> None:
    assert first_of(at_the_end(change), 3) == ("gradient", label)


def _two_steps(rank: int, world_size: int, between: Callable[..., None]) -> Record:
    model = mlp()
    with record(model, optimizer := sgd(model)) as recorded:
        for step in range(2):
            optimizer.zero_grad()
            x, y = mine(rank, world_size, step)
            mse_loss(model(x), y).backward()
            synchronized(model)
            if step == 1:
                between(model, optimizer)
            optimizer.step()
    return recorded


def lose_the_state(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def keep_the_old_gradient(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        param.grad = optimizer.state[param]["momentum_buffer"].clone()  # after one step, the same


@pytest.mark.parametrize(
    ("between", "kind", "label"),
    [(lose_the_state, "state", "begun anew"), (keep_the_old_gradient, "gradient", "stale")],
)
def test_of_two_steps(between: Callable[..., None], kind: str, label: str) -> None:
    step = partial(_two_steps, world_size=2, between=between)
    records = simulated(2).run(lambda: step(dist.get_rank()))
    first = compare(trusted_run(partial(one_rank, steps=2)), records).first
    assert first is not None
    assert (first.key.step, first.key.kind, first.label) == (1, kind, label)


def test_what_is_wrong_before_anything_is_sent() -> None:
    def step() -> Record:
        model = mlp()
        with record(model, optimizer := sgd(model)) as recorded:
            x, y = mine(dist.get_rank(), 2)
            mse_loss(model(x), y.flip(0)).backward()  # other targets
            synchronized(model)
            optimizer.step()
        return recorded

    first = compare(trusted_run(one_rank), simulated(2).run(step)).first
    assert first is not None and (first.key.kind, first.label) == ("gradient", "wrong shares")


def test_frozen_on_one_rank() -> None:
    def step() -> Record:
        model = mlp()
        model[0].weight.requires_grad_(dist.get_rank() == 0)
        with record(model, optimizer := sgd(model)) as recorded:
            x, y = mine(dist.get_rank(), 2)
            mse_loss(model(x), y).backward()
            for param in model.parameters():
                mean = torch.zeros_like(param) if param.grad is None else param.grad / 2
                dist.all_reduce(mean)
                param.grad = None if param.grad is None else mean
            optimizer.step()
        return recorded

    first = compare(trusted_run(one_rank), simulated(2).run(step)).first
    assert first is not None and first.label == "frozen" and 1 in first.ranks


def test_one_weight_of_one_rank() -> None:
    def step() -> Record:
        model = mlp()
        if dist.get_rank() == 1:
            with torch.no_grad():
                model[3].weight[2, 5] += 0.01
        with record(model, optimizer := sgd(model)) as recorded:
            x, y = mine(dist.get_rank(), 4)
            mse_loss(model(x), y).backward()
            synchronized(model)
            optimizer.step()
        return recorded

    first = compare(trusted_run(one_rank), simulated(4).run(step)).first
    assert first is not None
    assert (first.key.kind, first.key.name, first.ranks) == ("weight", "3.weight", [1])
    assert first.part == "[2:3, 5:6]"
