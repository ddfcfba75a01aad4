"""``check_nan=True``: the first communication that carries NaN, by rank and line. Item 24."""

from collections.abc import Iterator
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from course_lib.ranks import RankError, Ranks


@pytest.fixture(scope="module", params=["cpu", "simulated"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    on: Literal["cpu", "simulated"] = request.param
    with Ranks(3, on=on) as three:
        yield three


@pytest.mark.parametrize("send", [False, True])
def test_the_first_nan_names_its_rank_and_line(ranks: Ranks, send: bool) -> None:
    def fn() -> None:
        x = torch.ones(2, 3)
        dist.all_reduce(x)
        if dist.get_rank() == 1:
            x[1, 2] = torch.nan
        if send:
            dist.recv(x, 1) if dist.get_rank() == 0 else None
            dist.send(x, 0) if dist.get_rank() == 1 else None
        dist.all_reduce(x)
        dist.all_reduce(x)

    ranks.run(fn)
    with pytest.raises(RankError) as caught:
        ranks.run(fn, check_nan=True)
    kind, line = ("send", 7) if send else ("all_reduce", 8)
    assert caught.value.rank == 1
    said = f"{kind} would send NaN: 1 of 6 elements are NaN, the first at [1, 2]"
    assert said in str(caught.value)
    assert f"test_check_nan.py, line {fn.__code__.co_firstlineno + line}" in caught.value.summary
    assert ranks.run(lambda: dist.all_reduce(torch.ones(1)), check_nan=True) == [None] * 3


def test_what_is_overwritten_may_be_anything(ranks: Ranks) -> None:
    def fn() -> float:
        mine = torch.full((2,), 1.0 if dist.get_rank() == 2 else torch.nan)
        dist.broadcast(mine, 2)
        theirs = torch.full((2,), torch.nan)
        sending = dist.isend(mine, (dist.get_rank() + 1) % 3)
        dist.recv(theirs, (dist.get_rank() - 1) % 3)
        sending.wait()
        parts = [torch.full((2,), torch.nan) for _ in range(3)]
        dist.all_gather(parts, theirs)
        return float(sum(part.sum() for part in parts))

    assert ranks.run(fn, check_nan=True) == [6.0] * 3


def test_a_gradient_of_ddp(ranks: Ranks) -> None:
    def fn() -> None:
        model = DDP(torch.nn.Linear(2, 1))
        factor = torch.nan if dist.get_rank() == 2 else 1.0
        model(torch.ones(1, 2)).sum().mul(factor).backward()

    with pytest.raises(RankError, match="all_reduce would send NaN") as caught:
        ranks.run(fn, check_nan=True)
    assert caught.value.rank == 2


def test_ranks_without_a_meter_refuse() -> None:
    with Ranks(2, on="cpu", metered=False) as bare, pytest.raises(ValueError, match="metered"):
        bare.run(lambda: None, check_nan=True)
