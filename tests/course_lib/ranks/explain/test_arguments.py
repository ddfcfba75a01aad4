"""A function that cannot take its arguments is told what `run` does with them."""

import functools
import inspect

import pytest

from course_lib.ranks import RankError, Ranks
from course_lib.ranks.explain.arguments import OPTIONS


def spawned(rank: int, world_size: int) -> int:  # as mp.spawn would call it
    return rank * world_size


def plain() -> None: ...


def raises_inside() -> None:
    spawned()


@pytest.mark.parametrize("on", ["simulated", "cpu"])
@pytest.mark.parametrize(
    ("function", "args", "options", "hint"),
    [
        (functools.partial(spawned, 1), (), {}, "dist.get_world_size() the number of ranks"),
        (spawned, (1,), {}, "dist.get_world_size() the number of ranks"),
        (plain, (), {"timeout": 5}, "'timeout' is an option of Ranks, not of run"),
        (plain, (), {"seed": 5}, "unexpected keyword argument 'seed'"),
    ],
)
def test_hints(ranks_of, on, function, args, options, hint):
    with pytest.raises(RankError) as caught:
        ranks_of(on, 2).run(function, *args, **options)
    assert hint in str(caught.value)


def test_the_function_s_own_calls_get_no_hint() -> None:
    with Ranks(2, on="simulated") as ranks, pytest.raises(RankError) as caught:
        ranks.run(raises_inside)
    assert "missing 2 required" in str(caught.value)
    assert "dist.get_rank() returns" not in str(caught.value)


def test_every_option_of_ranks_is_known() -> None:
    assert set(OPTIONS) == {*inspect.signature(Ranks).parameters} - {"world_size"}
