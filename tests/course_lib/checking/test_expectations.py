"""Expectations on communication, each held and broken by a program on simulated ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from course_lib.checking import (
    NETWORK,
    Case,
    Expectation,
    Observed,
    Wrong,
    calls,
    calls_at_most,
    only_calls,
    only_peers,
    overlaps,
    receives_at_least,
    receives_at_most,
    sends_at_most,
    time_within,
)
from course_lib.checking.expectations import operations, received, sent
from course_lib.cost_model import ring_all_reduce_time
from course_lib.ranks import Ranks, Trace, compute

pytestmark = pytest.mark.every_case
NUMBERS = 1000


def trace_of(fn: Callable[[], None], k: int = 3) -> Trace:
    with Ranks(k, on="simulated", network=NETWORK) as ranks:
        ranks.run(fn)
        return ranks.trace


def finding(expectation: Expectation, trace: Trace, network: Any = NETWORK) -> str:
    """Return what the expectation says of a trace; nothing if it holds."""
    case = Case("x", trace.world_size)
    try:
        expectation.test(case, Observed([], trace, network), trace)
    except Wrong as wrong:
        return wrong.message
    return ""


def all_reduce() -> None:
    dist.all_reduce(torch.ones(NUMBERS))


def ring() -> None:
    rank, k = dist.get_rank(), dist.get_world_size()
    handle = dist.isend(torch.ones(NUMBERS), (rank + 1) % k)
    dist.recv(torch.ones(NUMBERS), (rank - 1) % k)
    handle.wait()


def gather_and_broadcast() -> None:
    x = torch.ones(NUMBERS)
    dist.gather(x, [x.clone() for _ in range(3)] if dist.get_rank() == 0 else None)
    dist.broadcast(x, 0)


def barrier_only() -> None:
    dist.barrier()


def neighbours(case: Case, rank: int) -> set[int]:
    return {(rank + 1) % case.world_size, (rank - 1) % case.world_size}


def right_only(case: Case, rank: int) -> set[int]:
    return {(rank + 1) % case.world_size}


@pytest.mark.parametrize(
    ("expectation", "right", "wrong", "words"),
    [
        (sends_at_most(4000), all_reduce, gather_and_broadcast, "rank 0 sends 7.8 KiB"),
        (receives_at_most(4000), all_reduce, gather_and_broadcast, "rank 0 receives 11.7 KiB"),
        (
            receives_at_least(4000),
            all_reduce,
            barrier_only,
            "rank 0 receives 0 B, expected at least",
        ),
        (receives_at_least(4000, kinds=["recv"]), ring, all_reduce, "receives 0 B by recv"),
        (sends_at_most(0, besides=["send"]), ring, all_reduce, "(without send), expected"),
        (calls(all_reduce=1), all_reduce, ring, "expected 1. It calls: 1 × send"),
        (calls_at_most(broadcast=0), ring, gather_and_broadcast, "expected at most 0"),
        (only_calls("all_reduce"), all_reduce, ring, "this task allows all_reduce only"),
        (only_calls(), lambda: None, ring, "this task allows no communication"),
        (only_peers(neighbours), ring, all_reduce, "1 × all_reduce, 3.9 KiB"),
    ],
)
def test_an_expectation_holds_and_fails(
    expectation: Expectation, right: Any, wrong: Any, words: str
) -> None:
    assert finding(expectation, trace_of(right)) == ""
    assert words in finding(expectation, trace_of(wrong))


def test_a_finding_names_the_line_the_peer_and_the_rank() -> None:
    found = finding(only_peers(right_only), trace_of(ring, 4))
    assert "rank 0 may exchange messages only with rank 1" in found
    assert "1 × recv from rank 3, 3.9 KiB (test_expectations.py, line" in found


def test_time_against_the_formula() -> None:
    def formula(case: Case, network: Any) -> float:
        longest_piece = -(-NUMBERS // case.world_size)
        nbytes = 4 * longest_piece * case.world_size
        return ring_all_reduce_time(nbytes, case.world_size, network)

    def twice() -> None:
        all_reduce()
        all_reduce()

    for k in (1, 2, 3, 4):
        assert finding(time_within(formula), trace_of(all_reduce, k)) == ""
    assert "expected at most" in finding(time_within(formula), trace_of(twice))
    assert finding(time_within(formula), trace_of(twice), network=None) == ""


def test_half_a_percent_of_time_decides_nothing() -> None:
    trace = trace_of(all_reduce)

    def limit(factor: float) -> str:
        return finding(time_within(lambda *_: trace.makespan * factor), trace)

    assert limit(44.03 / 44.06) == limit(1 - 0.0049) == limit(1.1) == ""
    assert "expected at most" in limit(1 - 0.0051)


def test_overlap_with_computation() -> None:
    def hidden() -> None:
        handle = dist.all_reduce(torch.ones(NUMBERS), async_op=True)
        compute(1.0)
        handle.wait()

    def bare() -> None:
        compute(1.0)
        all_reduce()

    assert finding(overlaps("all_reduce", 0.9), trace_of(hidden)) == ""
    assert "during 0 % of its time in all_reduce" in finding(
        overlaps("all_reduce", 0.9), trace_of(bare)
    )


@pytest.mark.parametrize("kind", ["all_gather", "gather", "scatter", "reduce_scatter", "broadcast"])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_a_collective_hands_over_and_leaves_behind_what_its_tensors_hold(kind: str, k: int) -> None:
    """Counted at the call: the tensors that a rank gives, and those that it is left with."""

    def call() -> tuple[int, int]:
        x, many = torch.ones(5), [torch.ones(5) for _ in range(k)]
        root = dist.get_rank() == 0
        if kind == "all_gather":
            dist.all_gather(many, x)
            return 20, 20 * k
        if kind == "gather":
            dist.gather(x, many if root else None)
            return 20, 20 * k if root else 0
        if kind == "scatter":
            dist.scatter(x, many if root else None)
            return 20 * k if root else 0, 20
        if kind == "reduce_scatter":
            dist.reduce_scatter(x, many)
            return 20 * k, 20
        dist.broadcast(x, 0)
        return (20, 0) if root else (0, 20)

    with Ranks(k, on="simulated") as ranks:
        counted = ranks.run(call)
        for rank, (gave, got) in enumerate(counted):
            events = operations(ranks.trace, rank)
            assert (sum(map(sent, events)), sum(map(received, events))) == (gave, got)
