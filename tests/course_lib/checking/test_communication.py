"""Demands on communication, each met and missed by a program on simulated ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from course_lib.checking import (
    NETWORK,
    Allowed,
    Case,
    Expectation,
    Observed,
    Wrong,
    computes_between,
    sends_at_most,
)
from course_lib.checking.communication import expect_as_reference, operations, received, sent
from course_lib.ranks import Ranks, Trace, compute

pytestmark = pytest.mark.every_case
NUMBERS = 1000


def trace_of(function: Callable[[], None], k: int = 3) -> Trace:
    with Ranks(k, on="simulated", network=NETWORK) as ranks:
        ranks.run(function)
        return ranks.trace


def all_reduce() -> None:
    dist.all_reduce(torch.ones(NUMBERS))


def twice() -> None:
    all_reduce()
    all_reduce()


def ring(step: int = 1, empty: int = -1) -> None:
    """Pass a tensor on; the rank `empty` has none to give."""
    rank, k = dist.get_rank(), dist.get_world_size()
    source = (rank - step) % k
    handle = dist.isend(torch.ones(NUMBERS * (rank != empty)), (rank + step) % k)
    dist.recv(torch.ones(NUMBERS * (source != empty)), source)
    handle.wait()


def before_the_message() -> None:
    compute(1e-3)
    all_reduce()


def after_the_message() -> None:
    all_reduce()
    compute(1e-3)


def finding(test: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """Return what the test says of its arguments; nothing if it finds nothing."""
    try:
        test(*arguments, **options)
    except Wrong as fault:
        return fault.message
    return ""


def in_order(*limits: tuple[float, float]) -> Expectation:
    return computes_between(lambda case, observed, rank: limits, "all_reduce")


@pytest.mark.parametrize(
    ("demand", "right", "offender", "message"),
    [
        (sends_at_most(4000), all_reduce, twice, "rank 0 sends 7.8 KiB, expected at most 3.9 KiB"),
        (sends_at_most(0, besides=["send"]), ring, all_reduce, "(without send), expected"),
        (
            *(in_order((1e-3, math.inf)), before_the_message, after_the_message),
            "is launched after 0 ms of computation, expected at least 1 ms",
        ),
        (
            *(in_order((0.0, 0.0)), after_the_message, before_the_message),
            "ends after 1 ms of computation, expected at most 0 ms",
        ),
    ],
)
def test_a_demand_is_met_and_missed(demand, right, offender, message):
    for function, expected in ((right, ""), (offender, message)):
        trace = trace_of(function)
        fault = finding(demand.test, Case("a case", 3), Observed([], trace, NETWORK), trace)
        assert expected in fault and bool(expected) == bool(fault)


@pytest.mark.parametrize(
    ("function", "reference", "allowed", "message"),
    [
        (ring, all_reduce, {}, "calls 1 × send to rank 1, 3.9 KiB (test_communication.py, line"),
        (ring, all_reduce, {"kinds": ("send", "recv"), "calls": 1}, ""),
        (twice, all_reduce, {}, "rank 0 calls all_reduce 2 times, expected at most 1. It calls: 2"),
        (twice, all_reduce, {"calls": 1}, "rank 0 sends 7.8 KiB, expected at most 3.9 KiB"),
        (twice, all_reduce, {"calls": 1, "slack": 4000}, ""),
        (twice, all_reduce, {"calls": 1, "slack": None, "time": 1.1}, "the ranks need "),
        (
            dist.barrier,
            all_reduce,
            {"kinds": ("barrier",), "calls": 1},
            "receive 0 B, expected at lea",
        ),
        (
            dist.barrier,
            all_reduce,
            {"kinds": ("barrier",), "calls": 1, "least": 1e-9},
            "at least 1 B",
        ),
        (lambda: ring(2), ring, {}, "rank 0 may exchange messages only with ranks 1, 3 here"),
        (lambda: ring(2), ring, {"roles": True}, ""),
        (lambda: ring(-1, empty=0), lambda: ring(1, empty=0), {}, ""),
        (after_the_message, before_the_message, {}, ""),
        (after_the_message, before_the_message, {"in_order": True}, "expected at least 1 ms"),
        (twice, all_reduce, {"calls": None, "slack": None, "in_order": True}, "in this order: all"),
    ],
)
def test_a_function_communicates_as_its_reference_or_as_is_allowed(
    function: Any, reference: Any, allowed: dict[str, Any], message: str
) -> None:
    traces = trace_of(function, 4), trace_of(reference, 4)
    case, exceptions = Case("a case", 4), Allowed(**allowed)
    fault = finding(expect_as_reference, case, [{}] * 4, *traces, exceptions, timed=True)
    assert message in fault and bool(message) == bool(fault)


@pytest.mark.parametrize("kind", ["all_gather", "gather", "scatter", "reduce_scatter", "broadcast"])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_a_collective_hands_over_and_leaves_behind_what_its_tensors_hold(kind: str, k: int) -> None:
    """Counted at the call: the tensors that a rank gives, and those that it is left with."""

    def call() -> tuple[int, int]:
        x, tensors, root = torch.ones(5), [torch.ones(5)] * k, dist.get_rank() == 0
        arguments, handed_over, left = {
            "all_gather": ((tensors, x), 20, 20 * k),
            "gather": ((x, tensors if root else None), 20, 20 * k * root),
            "scatter": ((x, tensors if root else None), 20 * k * root, 20),
            "reduce_scatter": ((x, tensors), 20 * k, 20),
            "broadcast": ((x, 0), 20 * root, 20 * (not root)),
        }[kind]
        getattr(dist, kind)(*arguments)
        return handed_over, left

    with Ranks(k, on="simulated") as ranks:
        for rank, expected in enumerate(ranks.run(call)):
            events = operations(ranks.trace, rank)
            assert (sum(map(sent, events)), sum(map(received, events))) == expected
