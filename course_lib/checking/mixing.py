"""Mixing matrices for checks, who talks to whom under them, and what mixing gives.

A matrix is made of whole numbers over one denominator, so that it travels exactly to ranks of every
dtype. The weights of a graph with links are one over the largest number of neighbours plus one, the
same for all links: not the ones that an assignment asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from course_lib.checking.cases import Case, Expectation
from course_lib.checking.expectations import (
    calls_at_most,
    only_calls,
    only_peers,
    sends_at_most,
    time_within,
)
from course_lib.checking.judges import Oracle
from course_lib.checking.on_ranks.given import Given
from course_lib.ranks.costs.network import Network

HOPS = {"one way": (0, 1), "hops 0, 1, 3": (0, 1, 3), "swap": (1, -1), "turn": (1,)}
"""Directed graphs: a rank hears those so far ahead of it, and itself where 0 is among them."""


def links_of(graph: str, k: int) -> list[tuple[int, int]]:
    """Return the links of a graph of k ranks, each once, the lower rank first."""
    pairs = {
        "line": [(i, i + 1) for i in range(k - 1)],
        "ring": [(i, (i + 1) % k) for i in range(k)],
        "star": [(0, i) for i in range(1, k)],
        "complete": [(i, j) for j in range(k) for i in range(j)],
        "pairs": [(i, i + 1) for i in range(0, k - 1, 2)],
        "alone": [],
    }
    return sorted({(min(a, b), max(a, b)) for a, b in pairs[graph] if a != b})


def whole_numbers(graph: str, k: int) -> tuple[Tensor, int]:
    """Return `(N, d)`, the matrix N / d in whole numbers; row i is what rank i hears.

    Graphs joined by ``*`` are matrices multiplied: ``star * one way`` is not normal.
    """
    if "*" in graph:
        product, denominator = torch.eye(k, dtype=torch.int64), 1
        for factor in graph.split(" * "):
            numbers, each = whole_numbers(factor, k)
            product, denominator = product @ numbers, denominator * each
        return product, denominator
    matrix = torch.zeros(k, k, dtype=torch.int64)
    if graph in HOPS:
        for rank in range(k):
            for hop in HOPS[graph]:
                matrix[rank, (rank + hop) % k] += 1
        return matrix, len(HOPS[graph])
    for a, b in links_of(graph, k):
        matrix[a, b] = matrix[b, a] = 1
    denominator = int(matrix.sum(1).max()) + 1
    return matrix + torch.diag(denominator - matrix.sum(1)), denominator


def weights_of(graph: str, k: int) -> Tensor:
    """Return the matrix of `whole_numbers`, float64."""
    numbers, denominator = whole_numbers(graph, k)
    return numbers.double() / denominator


def as_weights(matrix: Mapping[str, Any], like: Tensor) -> Tensor:
    """Return the matrix that a rank is given: float64 with float64 tensors, else float32."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    made: Tensor = matrix["numbers"].to(like.device, dtype) / matrix["denominator"]
    return made


def watched_weights(given: Given, made: Sequence[Mapping[str, Any]], like: Tensor) -> list[Tensor]:
    """Return `as_weights` of each, which the function must leave as they are."""
    weights = [as_weights(matrix, like) for matrix in made]
    given.watch.add_parameters("the matrix", weights)
    return weights


def matrices(case: Case, rank: int) -> list[dict[str, Any]]:
    """Return the matrix of each step of ``graphs``, for `as_weights` on this rank."""
    k = len(case.members(rank))
    made = [whole_numbers(graph, k) for graph in case.parameters["graphs"]]
    return [{"numbers": numbers, "denominator": d} for numbers, d in made]


def neighbours(case: Case, rank: int) -> set[int]:
    """Return those whom `rank` hears, or who hear it, in some step."""
    members, found = case.members(rank), set()
    me = members.index(rank)
    for graph in case.parameters["graphs"]:
        numbers, _ = whole_numbers(graph, len(members))
        found |= {members[int(j)] for j in (numbers[me] + numbers[:, me]).nonzero()}
    return found - {rank}


def messages_sent(case: Case, rank: int) -> int:
    """Return how many messages a rank has to send in all steps together."""
    return _messages(case, rank, 0)


def messages_received(case: Case, rank: int) -> int:
    """Return how many messages a rank has to receive in all steps together."""
    return _messages(case, rank, 1)


def _messages(case: Case, rank: int, dim: int) -> int:
    members = case.members(rank)
    me, total = members.index(rank), 0
    for graph in case.parameters["graphs"]:
        numbers, _ = whole_numbers(graph, len(members))
        numbers.fill_diagonal_(0)
        total += int((numbers > 0).sum(dim)[me])
    return total


def one_message_each(elements: Callable[[Case], int]) -> list[Expectation]:
    """Expect messages between neighbours, one each in every step, all under way at once.

    A case may have ``seconds``, what a rank computes in a step, meanwhile. `elements(case)`: of the
    tensors that are mixed.
    """

    def seconds(case: Case, network: Network) -> float:
        # A latency and a half: room for the bytes, and none for a second message behind the first.
        steps, busy = len(case.parameters["graphs"]), case.parameters.get("seconds", 0.0)
        longest: float = 1.01 * steps * max(busy, 1.5 * network.latency)
        return longest

    once = "In each step one message to each who hears this rank, one from each whom it hears."
    return [
        only_calls("send", "recv"),
        only_peers(neighbours),
        calls_at_most(once, send=messages_sent, recv=messages_received),
        sends_at_most(
            lambda case, rank: messages_sent(case, rank) * elements(case) * case.itemsize,
            hint="What is sent is the tensors, once to each who hears this rank.",
        ),
        time_within(
            seconds, hint="Begin all messages, then compute, then wait: they travel meanwhile."
        ),
    ]


def mixed(change: Callable[[Tensor], Tensor] = lambda weights: weights) -> Oracle:
    """Return the oracle that mixes two tensors with a changed matrix: a mistake, or none."""

    def oracle(case: Case, inputs: Sequence[Any], me: int) -> dict[str, Tensor]:
        weights = change(weights_of(case.parameters["graphs"][0], len(inputs)))
        found = {}
        for name in ("tensor", "second tensor"):
            tensors = torch.stack([each[name].double().contiguous() for each in inputs])
            value = (weights[me] @ tensors.view(len(inputs), -1)).view(tensors.shape[1:])
            found[name] = value.to(inputs[me][name].dtype)
        return found

    return oracle
