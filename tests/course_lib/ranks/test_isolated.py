"""Simulated ranks that are processes: the same values, times and errors, and nothing shared."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from course_lib.ranks import (
    DeadlockError,
    MisuseError,
    MisuseWarning,
    Network,
    RankError,
    Ranks,
    RankTimeout,
)

NETWORK = Network(latency=1e-3, bandwidth=1e6)


@pytest.fixture(scope="module")
def isolated() -> Iterator[Ranks]:
    with Ranks(3, on="simulated", network=NETWORK, isolated=True, timeout=60) as ranks:
        yield ranks


def fn(scale: float) -> tuple[list[float], float]:
    rank = dist.get_rank()
    x = torch.full((1000,), scale * (1 + rank))
    if rank == 1:
        time.sleep(2)  # virtual
    dist.all_reduce(x)
    x = torch.nn.functional.linear(x[:2], torch.ones(1, 2))
    return x.tolist(), time.perf_counter()


def test_values_and_times_are_those_of_threads(isolated: Ranks) -> None:
    threads = Ranks(3, on="simulated", network=NETWORK)
    assert isolated.run(fn, 2.0) == threads.run(fn, 2.0)
    ours = sorted((e.rank, e.kind, e.start, e.end) for e in isolated.trace.events)
    theirs = sorted((e.rank, e.kind, e.start, e.end) for e in threads.trace.events)
    assert [each for each in ours if each[1] != "compute"] == [
        each for each in theirs if each[1] != "compute"
    ]
    assert "simulated" in repr(isolated) and isolated.devices == ["simulated"] * 3


def test_nothing_is_shared(isolated: Ranks) -> None:
    def alone() -> Any:
        first = getattr(torch, "left_by_a_rank", None)
        torch.left_by_a_rank = dist.get_rank()  # type: ignore[attr-defined]
        dist.barrier()
        return first, torch.left_by_a_rank, os.getpid()  # type: ignore[attr-defined]

    found = isolated.run(alone)
    assert [each[:2] for each in found] == [(None, rank) for rank in range(3)]
    assert len({each[2] for each in found} | {os.getpid()}) == 4
    assert not hasattr(torch, "left_by_a_rank")


def test_ddp(isolated: Ranks) -> None:
    def grad() -> list[float]:
        model = DDP(torch.nn.Linear(1, 1, bias=False))
        model(torch.full((1, 1), 1.0 + dist.get_rank())).sum().backward()
        return model.module.weight.grad.flatten().tolist()

    assert isolated.run(grad) == [[2.0]] * 3


def test_failures_are_explained_and_the_next_call_works(isolated: Ranks) -> None:
    def hangs() -> None:
        dist.recv(torch.ones(1), (dist.get_rank() + 1) % 3)

    def fails() -> None:
        if dist.get_rank() == 1:
            raise KeyError("as planned")
        dist.barrier()

    def never_waits() -> None:
        dist.barrier(async_op=True)

    with pytest.raises(DeadlockError, match="wait for one another"):
        isolated.run(hangs)
    with pytest.raises(RankError, match="KeyError: 'as planned'") as caught:
        isolated.run(fails)
    assert caught.value.rank == 1 and isinstance(caught.value.original, KeyError)
    with pytest.warns(MisuseWarning, match="never waited for barrier"):
        isolated.run(never_waits)
    with pytest.raises(RankError, match="would send NaN"):
        isolated.run(lambda: dist.all_reduce(torch.tensor(torch.nan)), check_nan=True)
    assert isolated.run(dist.get_rank) == [0, 1, 2]


def test_a_call_that_cannot_be_sent_starts_nothing(isolated: Ranks) -> None:
    import threading

    before = threading.active_count()
    with pytest.raises(TypeError, match="cannot be sent"):
        isolated.run(print, threading.Lock())
    assert threading.active_count() == before


def test_an_endless_loop_meets_the_limit() -> None:
    def spin() -> None:
        while dist.get_rank() == 0:
            pass

    with Ranks(2, on="simulated", isolated=True, timeout=2, misuse="error") as ranks:
        with pytest.raises(RankTimeout):
            ranks.run(spin)
        with pytest.raises(MisuseError):
            ranks.run(lambda: dist.barrier(async_op=True) and None)
        assert ranks.run(dist.get_rank) == [0, 1]


def test_what_it_cannot_have_is_refused() -> None:
    with pytest.raises(ValueError, match="isolated=True works only with"):
        Ranks(2, on="cpu", isolated=True)
