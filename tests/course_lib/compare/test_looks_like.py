"""Mistakes that no project is known for: each pattern is read from numbers, in bfloat16 too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from course_lib.compare import Record, compare, record, trusted_run
from course_lib.ranks import Ranks
from tests.course_lib.compare.museum import (
    SHAPED,
    Dropped,
    batch,
    mine,
    mlp,
    one_rank,
    scaled,
    sgd,
    summed,
    synchronized,
    train,
)

Change = Callable[[nn.Module], None]
"""What a rank does with its gradients after backward."""


@functools.cache
def simulated(world_size: int) -> Ranks:
    return Ranks(world_size, on="simulated")


def first_of(
    change: Change, world_size: int, dtype: torch.dtype = torch.float32
) -> tuple[str, str] | None:
    """Return kind and label of the first difference, if `change` is done with the gradients."""

    def step() -> Record:
        return train(
            mlp().to(dtype),
            dist.get_rank(),
            world_size,
            after=change,
            dtype=dtype,
        )

    trusted = trusted_run(lambda: one_rank(dtype=dtype))
    first = compare(trusted, simulated(world_size).run(step)).first
    return None if first is None else (first.key.kind, first.label)


def divided_again(model: nn.Module) -> None:
    synchronized(model)
    scaled(model, 1 / dist.get_world_size())


@pytest.mark.parametrize(
    ("change", "label"), [(summed, "times K"), (lambda _: None, "no all-reduce")]
)
def test_a_pattern_is_named_in_bfloat16(change: Change, label: str) -> None:
    assert first_of(change, 3, torch.bfloat16) == ("gradient", label)


def test_what_is_wrong_before_anything_is_sent() -> None:
    def step() -> Record:
        x, y = mine(dist.get_rank(), 2)
        return train(mlp(), data=lambda _: (x, y.flip(0)), after=synchronized)  # other targets

    first = compare(trusted_run(one_rank), simulated(2).run(step)).first
    assert first is not None and (first.key.kind, first.label) == ("gradient", "wrong shares")


def test_frozen_on_one_rank() -> None:
    def after(model: nn.Module) -> None:
        for param in model.parameters():
            mean = torch.zeros_like(param) if param.grad is None else param.grad / 2
            dist.all_reduce(mean)
            param.grad = None if param.grad is None else mean

    def step() -> Record:
        model = mlp()
        model[0].weight.requires_grad_(dist.get_rank() == 0)
        return train(model, dist.get_rank(), 2, after=after)

    first = compare(trusted_run(one_rank), simulated(2).run(step)).first
    assert first is not None and first.label == "frozen" and 1 in first.ranks


@pytest.mark.parametrize("name", SHAPED)
def test_a_model_that_returns_other_things_than_rows(name: str) -> None:
    """The outputs of the ranks are other ones for a good reason; the gradients are the fault."""

    def step() -> Record:
        return SHAPED[name].train(dist.get_rank(), 2, 0, sync=summed)

    first = compare(trusted_run(SHAPED[name].one), simulated(2).run(step)).first
    assert first is not None and (first.key.kind, first.label) == ("gradient", "times K")


@pytest.mark.parametrize("times", [1, 2])
def test_a_small_factor_is_not_zero(times: int) -> None:
    """At 12 ranks a mean that is divided by K again is 0.083 of the right one."""

    def change(model: nn.Module) -> None:
        for _ in range(times):
            divided_again(model)

    label = ("divided by K", "divided by K²")[times - 1]
    assert first_of(change, 12) == ("gradient", label)


@pytest.mark.parametrize("world_size", [2, 3])
def test_one_rank_is_left_in_evaluation_mode(world_size: int) -> None:
    def step() -> Record:
        model = Dropped()
        model.train(dist.get_rank() != 0)
        return train(model, dist.get_rank(), world_size, after=synchronized, steps=2)

    trusted = trusted_run(partial(one_rank, make=Dropped, steps=2))
    first = compare(trusted, simulated(world_size).run(step)).first
    assert first is not None and (first.label, first.ranks) == ("mode", [0])


def _batches(rank: int, world_size: int, windows: list[list[int]]) -> Record:
    """Take a step for each window, a list of the numbers of its micro-batches of 4 rows."""
    model = mlp()
    with record(model, optimizer := sgd(model)) as recorded:
        for window in windows:
            optimizer.zero_grad()
            for number in window:
                x, y = (each.tensor_split(world_size)[rank] for each in batch(number, 4))
                (mse_loss(model(x), y) / len(window)).backward()
            if world_size > 1:
                synchronized(model)
            optimizer.step()
    return recorded


@pytest.mark.parametrize(
    ("right", "wrong", "step"),
    [
        ([[0, 1], [2], [3, 4]], [[0, 1], [2, 3, 4]], 1),  # the short window is not taken
        ([[0, 1], [3, 4]], [[0, 1], [2, 3, 4]], 1),  # the short window should be dropped
        ([[0], [1], [2]], [[0, 1], [2]], 0),  # one call of step() is skipped
    ],
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_forward_too_many(
    right: list[list[int]], wrong: list[list[int]], step: int, world_size: int
) -> None:
    trusted = trusted_run(lambda: _batches(0, 1, right))
    records = simulated(world_size).run(lambda: _batches(dist.get_rank(), world_size, wrong))
    first = compare(trusted, records).first
    assert first is not None
    assert (first.key.step, first.key.kind, first.label) == (step, "input", "too many forwards")


@pytest.mark.parametrize(("rows", "step", "label"), [(8, 0, "rows missing"), (12, 5, "other rows")])
def test_rows_that_no_rank_should_have_or_lack(rows: int, step: int, label: str) -> None:
    def wrong() -> Record:
        start = rows * dist.get_rank()
        own = [each[start : start + rows] for each in batch(step)]
        return train(mlp(), data=lambda _: own, after=synchronized)

    first = compare(trusted_run(one_rank), simulated(2).run(wrong)).first
    assert first is not None and (first.key.kind, first.label) == ("input", label), first.says


@pytest.mark.parametrize("strided", [False, True])
def test_equal_rows_are_not_taken_twice(strided: bool) -> None:
    def step(rank: int, world_size: int) -> Record:
        rows = [torch.cat([each[:6], each[:6]]) for each in batch()]
        if world_size == 1:
            return train(mlp(), data=lambda _: rows)
        own = slice(rank, None, world_size) if strided else slice(rank * 6, rank * 6 + 6)
        return train(mlp(), data=lambda _: [each[own] for each in rows], after=synchronized)

    records = simulated(2).run(lambda: step(dist.get_rank(), 2))
    assert compare(trusted_run(lambda: step(0, 1)), records).first is None
