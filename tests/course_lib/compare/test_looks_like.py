"""Mistakes that no project is known for: each pattern is read from numbers, in bfloat16 too."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from course_lib.compare import compare, record, trusted_run
from tests.course_lib.compare import museum
from tests.helpers.carriers import ranks_on


def first_of(step, right=museum.one_rank, world_size=2):
    """Return the first difference between `step` on the ranks and `right` on one rank."""
    first = compare(trusted_run(right), ranks_on("simulated", world_size).run(step)).first
    assert first is not None
    return first


@pytest.mark.parametrize(
    ("after", "label"), [(museum.summed, "times K"), (lambda _: None, "no all-reduce")]
)
def test_a_pattern_is_named_in_bfloat16(after, label: str) -> None:
    one = partial(museum.one_rank, dtype=torch.bfloat16)
    step = lambda: museum.train(museum.mlp().to(torch.bfloat16), after=after, dtype=torch.bfloat16)
    first = first_of(step, one, world_size=3)
    assert (first.key.kind, first.label) == ("gradient", label)


def test_what_is_wrong_before_anything_is_sent() -> None:
    def step():
        x, y = museum.own_batch()
        return museum.train(
            museum.mlp(), data=lambda _: (x, y.flip(0)), after=museum.synchronized
        )  # other targets

    first = first_of(step)
    assert (first.key.kind, first.label) == ("gradient", "wrong shares")


def test_frozen_on_one_rank() -> None:
    def after(model) -> None:
        for param in model.parameters():
            mean = torch.zeros_like(param) if param.grad is None else param.grad / 2
            dist.all_reduce(mean)
            param.grad = None if param.grad is None else mean

    def step():
        model = museum.mlp()
        model[0].weight.requires_grad_(dist.get_rank() == 0)
        return museum.train(model, after=after)

    first = first_of(step)
    assert first.label == "frozen" and 1 in first.ranks


@pytest.mark.parametrize("name", museum.SHAPED)
def test_a_model_that_returns_other_things_than_rows(name: str) -> None:
    """The outputs of the ranks are other ones for a good reason; the gradients are the fault."""
    step = lambda: museum.SHAPED[name].train(strided=True, sync=museum.summed)
    first = first_of(step, museum.SHAPED[name].train)
    assert (first.key.kind, first.label) == ("gradient", "times K")


@pytest.mark.parametrize(("times", "label"), [(1, "divided by K"), (2, "scaled")])
def test_a_small_factor_is_not_zero(times: int, label: str) -> None:
    """At 12 ranks a mean that is divided by K again is 0.083 of the right one."""

    def after(model) -> None:
        museum.synchronized(model)
        museum.scaled(model, 1 / dist.get_world_size() ** times)

    first = first_of(lambda: museum.train(museum.mlp(), after=after), world_size=12)
    assert (first.key.kind, first.label) == ("gradient", label)


@pytest.mark.parametrize("world_size", [2, 3])
def test_one_rank_is_left_in_evaluation_mode(world_size: int) -> None:
    def step():
        model = museum.Dropped()
        model.train(dist.get_rank() != 0)
        return museum.train(model, after=museum.synchronized, steps=2)

    first = first_of(step, partial(museum.one_rank, make=museum.Dropped, steps=2), world_size)
    assert (first.label, first.ranks) == ("mode", [0])


def _batches(windows: list[list[int]]):
    """Take a step for each window, a list of the numbers of its micro-batches of 4 rows."""
    model = museum.mlp()
    with record(model, optimizer := museum.sgd(model)) as recorded:
        for window in windows:
            optimizer.zero_grad()
            for number in window:
                (museum.squared(model, *museum.own_batch(number, 4)) / len(window)).backward()
            if dist.is_initialized():
                museum.synchronized(model)
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
    def wrong():
        start = rows * dist.get_rank()
        data = [tensor[start : start + rows] for tensor in museum.batch(step)]
        return museum.train(museum.mlp(), data=lambda _: data, after=museum.synchronized)

    first = first_of(wrong)
    assert (first.key.kind, first.label) == ("input", label), first.says


@pytest.mark.parametrize("strided", [False, True])
def test_equal_rows_are_not_taken_twice(strided: bool) -> None:
    def step():
        rank, world_size = museum.rank_and_size()
        size = 12 // world_size
        rows = slice(rank, None, world_size) if strided else slice(rank * size, (rank + 1) * size)
        data = [torch.cat([tensor[:6], tensor[:6]])[rows] for tensor in museum.batch()]
        after = museum.synchronized if world_size > 1 else lambda _: None
        return museum.train(museum.mlp(), data=lambda _: data, after=after)

    assert compare(trusted_run(step), ranks_on("simulated", 2).run(step)).first is None
