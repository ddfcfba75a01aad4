"""Mistakes that no project is known for: each pattern is read from numbers, in bfloat16 too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib.compare import Record, compare, record, trusted_run
from course_lib.ranks import Ranks
from tests.course_lib.compare.museum import (
    SHAPED,
    Dropped,
    batch,
    mlp,
    one_rank,
    own_batch,
    rank_and_size,
    scaled,
    sgd,
    squared,
    summed,
    synchronized,
    train,
)


@functools.cache
def simulated(world_size: int) -> Ranks:
    return Ranks(world_size, on="simulated")


def first_of(step, right=one_rank, world_size=2):
    """Return the first difference between `step` on the ranks and `right` on one rank."""
    first = compare(trusted_run(right), simulated(world_size).run(step)).first
    assert first is not None
    return first


@pytest.mark.parametrize(
    ("after", "label"), [(summed, "times K"), (lambda _: None, "no all-reduce")]
)
def test_a_pattern_is_named_in_bfloat16(after: Callable[[nn.Module], None], label: str) -> None:
    one = partial(one_rank, dtype=torch.bfloat16)
    step = lambda: train(mlp().to(torch.bfloat16), after=after, dtype=torch.bfloat16)
    first = first_of(step, one, world_size=3)
    assert (first.key.kind, first.label) == ("gradient", label)


def test_what_is_wrong_before_anything_is_sent() -> None:
    def step() -> Record:
        x, y = own_batch()
        return train(mlp(), data=lambda _: (x, y.flip(0)), after=synchronized)  # other targets

    first = first_of(step)
    assert (first.key.kind, first.label) == ("gradient", "wrong shares")


def test_frozen_on_one_rank() -> None:
    def after(model: nn.Module) -> None:
        for param in model.parameters():
            mean = torch.zeros_like(param) if param.grad is None else param.grad / 2
            dist.all_reduce(mean)
            param.grad = None if param.grad is None else mean

    def step() -> Record:
        model = mlp()
        model[0].weight.requires_grad_(dist.get_rank() == 0)
        return train(model, after=after)

    first = first_of(step)
    assert first.label == "frozen" and 1 in first.ranks


@pytest.mark.parametrize("name", SHAPED)
def test_a_model_that_returns_other_things_than_rows(name: str) -> None:
    """The outputs of the ranks are other ones for a good reason; the gradients are the fault."""
    step = lambda: SHAPED[name].train(strided=True, sync=summed)
    first = first_of(step, SHAPED[name].train)
    assert (first.key.kind, first.label) == ("gradient", "times K")


@pytest.mark.parametrize(("times", "label"), [(1, "divided by K"), (2, "divided by K²")])
def test_a_small_factor_is_not_zero(times: int, label: str) -> None:
    """At 12 ranks a mean that is divided by K again is 0.083 of the right one."""

    def after(model: nn.Module) -> None:
        synchronized(model)
        scaled(model, 1 / dist.get_world_size() ** times)

    first = first_of(lambda: train(mlp(), after=after), world_size=12)
    assert (first.key.kind, first.label) == ("gradient", label)


@pytest.mark.parametrize("world_size", [2, 3])
def test_one_rank_is_left_in_evaluation_mode(world_size: int) -> None:
    def step() -> Record:
        model = Dropped()
        model.train(dist.get_rank() != 0)
        return train(model, after=synchronized, steps=2)

    first = first_of(step, partial(one_rank, make=Dropped, steps=2), world_size)
    assert (first.label, first.ranks) == ("mode", [0])


def _batches(windows: list[list[int]]) -> Record:
    """Take a step for each window, a list of the numbers of its micro-batches of 4 rows."""
    model = mlp()
    with record(model, optimizer := sgd(model)) as recorded:
        for window in windows:
            optimizer.zero_grad()
            for number in window:
                (squared(model, *own_batch(number, 4)) / len(window)).backward()
            if dist.is_initialized():
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
def test_a_forward_too_many(right, wrong, step, world_size):
    first = first_of(partial(_batches, wrong), partial(_batches, right), world_size)
    assert (first.key.step, first.key.kind, first.label) == (step, "input", "too many forwards")


@pytest.mark.parametrize(("rows", "step", "label"), [(8, 0, "rows missing"), (12, 5, "other rows")])
def test_rows_that_no_rank_should_have_or_lack(rows: int, step: int, label: str) -> None:
    def wrong() -> Record:
        start = rows * dist.get_rank()
        data = [tensor[start : start + rows] for tensor in batch(step)]
        return train(mlp(), data=lambda _: data, after=synchronized)

    first = first_of(wrong)
    assert (first.key.kind, first.label) == ("input", label), first.says


@pytest.mark.parametrize("strided", [False, True])
def test_equal_rows_are_not_taken_twice(strided: bool) -> None:
    def step() -> Record:
        rank, world_size = rank_and_size()
        size = 12 // world_size
        rows = slice(rank, None, world_size) if strided else slice(rank * size, (rank + 1) * size)
        data = [torch.cat([tensor[:6], tensor[:6]])[rows] for tensor in batch()]
        after = synchronized if world_size > 1 else lambda _: None
        return train(mlp(), data=lambda _: data, after=after)

    assert compare(trusted_run(step), simulated(2).run(step)).first is None
