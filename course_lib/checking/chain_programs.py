"""What is called on the chain of layers, and what its communication must be like.

Three programs: one bucket is sent, buckets are hooked, and parameters are made data parallel. Where
a case has several models, each has a call of its own, and all of them are under way at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from course_lib.checking.cases import Case, Expectation, Observed, Wrong
from course_lib.checking.on_ranks.given import Given
from course_lib.checking.shared.chain import (
    GRADIENTS,
    backward_time,
    bucket_bytes,
    called,
    chain_backward,
    chain_params,
    cleared_gradients,
)
from course_lib.checking.traffic import operations, told
from course_lib.ranks import Network, Trace, compute
from course_lib.ranks.costs.collective_time import collective_time

# On every rank --------------------------------------------------------------------------------


def send_program(send_bucket: Callable[..., Any], mine: Any, given: Given) -> Any:
    """Call ``send_bucket(params, group=group)``, compute for a while, and finish it."""
    params = chain_params(mine)
    sent = [
        called(
            send_bucket(given.iterable([params[i] for i in model]), group=given.group),
            "what send_bucket returns",
        )
        for model in mine["models"]
    ]
    compute(50 * mine["seconds"])
    for finish in sent[::-1]:
        finish()
    return {"gradient of parameter {}": _gradients(params, mine)}


def send_computes(own: Any) -> dict[float, int]:
    """Return how long `send_program` computes."""
    return {50 * own["seconds"]: 1}


def hooks_program(hook_buckets: Callable[..., Any], mine: Any, given: Given) -> Any:
    """Call ``hook_buckets(buckets, group=group)``; then, step by step, go back and ``finish()``."""
    params, finishes = chain_params(mine), []
    for model in mine["models"]:
        buckets: Any = [[params[i] for i in b] for b in mine["buckets"] if b[0] in model]
        buckets = tuple(buckets) if mine["in_place"] else buckets
        made = hook_buckets(buckets, group=given.group)
        finishes.append(called(made, "what hook_buckets returns"))
    found = []
    for uses, xs in zip(mine["uses"], mine["x"], strict=True):
        chain_backward(params, uses[0], xs[0], mine["seconds"])
        for finish in finishes[::-1]:
            finish()
        _gradients(params, mine)
        found.append(cleared_gradients(params, mine["in_place"]))
    return {GRADIENTS: found}


def hooks_computes(own: Any) -> dict[float, int]:
    """Return how long `hooks_program` computes: it walks the first micro-batch of every step."""
    return {own["seconds"]: sum(len(uses[0]) for uses in own["uses"])}


class _InterruptedError(Exception):
    """What leaves a context early."""


def parallel_program(data_parallel: Callable[..., Any], mine: Any, given: Given) -> Any:
    """Call ``data_parallel(params, cap, first_cap, group=group)``; accumulate, ``finish()``."""
    params = chain_params(mine)
    finishes, contexts = [], []
    for model in mine["models"]:
        tied = [params[i] for i in (*model, *(i for i in mine["again"] if i in model))]
        finish, no_sync = _pair(
            data_parallel(given.iterable(tied), mine["cap"], mine["first_cap"], group=given.group)
        )
        finishes.append(finish)
        contexts.append(no_sync)

    def back(use: Sequence[int], x: Sequence[torch.Tensor]) -> None:
        for context in contexts:  # once more, and left again: those around it still hold
            with context():
                pass
        chain_backward(params, use, x, mine["seconds"])

    found = []
    for uses, xs in zip(mine["uses"], mine["x"], strict=True):
        *local, last = zip(uses, xs, strict=True)
        for use, x in local:
            _inside(contexts, mine["interrupted"], partial(back, use, x))
        quiet = [contexts[i] for i in mine["quiet"]]
        _inside(quiet, False, partial(chain_backward, params, *last, mine["seconds"]))
        for finish in finishes[::-1]:
            finish()
        _gradients(params, mine)
        found.append(cleared_gradients(params, mine["in_place"]))
    return {GRADIENTS: found}


def parallel_computes(own: Any) -> dict[float, int]:
    """Return how long `parallel_program` computes: it walks every micro-batch."""
    return {own["seconds"]: sum(len(use) for uses in own["uses"] for use in uses)}


def _pair(made: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    if not isinstance(made, tuple) or len(made) != 2:
        raise TypeError(f"data_parallel returns {type(made).__name__}, expected (finish, no_sync)")
    return called(made[0], "finish"), called(made[1], "no_sync")


def _inside(
    contexts: Sequence[Callable[[], Any]], interrupted: bool, call: Callable[[], object]
) -> None:
    """Make the call inside all these contexts, which an exception may leave."""
    if not contexts:
        call()
        return
    try:
        with contexts[0]():
            _inside(contexts[1:], interrupted, call)
            if interrupted:
                raise _InterruptedError
        if interrupted:
            raise RuntimeError(
                "no_sync swallows an exception: what goes wrong inside must reach its caller"
            )
    except _InterruptedError:
        pass


def _gradients(params: Sequence[nn.Parameter], mine: Any) -> list[torch.Tensor | None]:
    """Return the gradients of parameters that are what they were."""
    if [i for i, param in enumerate(params) if not param.requires_grad] != sorted(mine["frozen"]):
        raise RuntimeError("the function changes which parameters require a gradient")
    return [param.grad for param in params]


# Where the verdict is made --------------------------------------------------------------------


def launches(case: Case, rank: int) -> int:
    """Return how many all-reduces there are: one for each bucket and step."""
    return len(bucket_bytes(case, rank))


def gradient_bytes(case: Case, rank: int) -> int:
    """Return how many bytes all gradients have."""
    return case.itemsize * sum(torch.Size(shape).numel() for shape in case.parameters["shapes"])


def _keep_the_cap(case: Case, observed: Observed, trace: Trace) -> None:
    for rank in range(case.world_size):
        largest = max(bucket_bytes(case, rank))
        for event in operations(trace, rank, ["all_reduce"]):
            if event.bytes > largest:
                raise Wrong(
                    f"rank {rank} sends a bucket of {event.bytes} B, where cap and dtypes allow "
                    f"{largest} B: {told([event])}"
                )


def _one_order(case: Case, observed: Observed, trace: Trace) -> None:
    for rank in range(case.world_size):
        launched = [event.bytes for event in operations(trace, rank, ["all_reduce"])]
        expected = bucket_bytes(case, rank)
        if launched != expected and len(case.members(rank)) > 1:  # alone, nothing need be sent
            raise Wrong(
                f"rank {rank} launches {launched}, expected the order {expected}",
                "These are the bytes of each all-reduce. Buckets leave in one order, complete or "
                "not.",
            )


keep_the_cap = Expectation(_keep_the_cap)
one_order = Expectation(_one_order)


def where(key: str, hint: str, expectation: Expectation) -> Expectation:
    """Return the expectation with a hint, for the cases whose parameters have `key`."""

    def test(case: Case, observed: Observed, trace: Trace) -> None:
        if case.parameters.get(key):
            try:
                expectation.test(case, observed, trace)
            except Wrong as wrong:
                raise Wrong(wrong.message, hint) from None

    return Expectation(test)


def overlapped_time(case: Case, network: Network) -> float:
    """Return the time in which the last bucket alone is left when backward is over."""
    last, steps = bucket_bytes(case, 0)[-1], len(case.parameters["steps"])
    left = collective_time(
        "all_reduce", network, len(case.members(0)), last, itemsize=case.itemsize
    )
    return 1.01 * (backward_time(case) + steps * left)


def times_faster(factor: float) -> Callable[[Case, Network], float]:
    """Return a formula: a `factor`-th of the time that one all-reduce per parameter takes."""

    def seconds(case: Case, network: Network) -> float:
        each = [torch.Size(shape).numel() * case.itemsize for shape in case.parameters["shapes"]]
        k, size = len(case.members(0)), case.itemsize
        once = sum(collective_time("all_reduce", network, k, n, itemsize=size) for n in each)
        return (backward_time(case) + len(case.parameters["steps"]) * once) / factor

    return seconds
