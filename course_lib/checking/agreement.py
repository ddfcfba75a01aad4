"""How ranks come to agree: weights for a graph, the spectral gap, and the fastest graph.

The judge of weights looks for what is wrong; the oracles compute from the matrices of `mixing`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from course_lib.checking.answers import ANYTHING, sees
from course_lib.checking.cases import Case, Wrong
from course_lib.checking.compare import describe
from course_lib.checking.judges import Oracle
from course_lib.checking.mixing import weights_of

_LINK = (
    "Both ends of a link give it the same weight, 1 over 1 plus the larger number of neighbours."
)
_REST = "What a rank's links leave of 1 is its own share."


@sees(ANYTHING)  # it looks at the form itself, and says what is wrong with it
def weighs_each_link(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
    """Judge the Metropolis weights of ``links`` among ``world_size`` ranks."""
    k, weights = case.parameters["world_size"], values[0]
    if not isinstance(weights, Tensor) or weights.shape != (k, k):
        raise Wrong(f"the answer is {describe(weights)}, expected a matrix of {k} × {k}")
    if weights.dtype != torch.float64:
        raise Wrong(f"the matrix has dtype {weights.dtype}, expected torch.float64")
    links = {frozenset(link) for link in case.parameters["links"]}
    degree = [sum(i in link for link in links) for i in range(k)]
    for i in range(k):
        for j in range(k):
            got, linked = float(weights[i, j]), frozenset((i, j)) in links
            if i != j and not linked and got != 0:
                raise Wrong(f"W[{i}, {j}] is {got:.6g}, and ranks {i} and {j} are not linked")
            if i != j and linked and not math.isclose(got * (1 + max(degree[i], degree[j])), 1):
                counts = f"rank {i} has {degree[i]} and rank {j} has {degree[j]} neighbours"
                raise Wrong(f"W[{i}, {j}] is {got:.6g}; {counts}", _LINK)
    for name, sums in (("row", weights.sum(1)), ("column", weights.sum(0))):
        wrong = (sums - 1).abs().nan_to_num(1.0) > 1e-9
        if wrong.any():
            which = int(wrong.nonzero()[0])
            raise Wrong(f"{name} {which} sums to {float(sums[which]):.6g}, expected 1", _REST)


def absolute_eigenvalues(weights: Tensor) -> list[float]:
    """Return the absolute eigenvalues but for one 1, the largest first; 0 if that is all."""
    return sorted([*torch.linalg.eigvals(weights).abs().tolist(), 0.0], reverse=True)[1:]


def gap(of: Callable[[Tensor], float]) -> Oracle:
    """Return the oracle of a number of the matrix of ``graph`` with ``k`` ranks."""
    return lambda case, inputs, me: {
        "spectral gap": of(weights_of(case.parameters["graph"], case.parameters["k"]))
    }


def most_heard(weights: Tensor) -> int:
    """Return the largest number of other ranks that one rank sends to."""
    return int(((weights > 0).sum(0) - (weights.diag() > 0).long()).max())


def chosen(
    heard: Callable[[Tensor], int] = most_heard,
    ways: int = 2,
    whole: Callable[[float], float] = math.ceil,
) -> Oracle:
    """Return the oracle of the fastest among ``candidates``, or, with an argument, of a mistake.

    Args:
        heard: messages of a rank in a step.
        ways: of the ring all-reduce, 2 · (K - 1) messages.
        whole: makes a number of steps of the exact one.

    """

    def oracle(case: Case, inputs: Sequence[Any], me: int) -> dict[str, Any]:
        given, k = case.parameters, case.parameters["k"]
        latency, per_byte = given["latency"], 1 / given["bandwidth"]
        times: list[tuple[float, int, int | None]] = [
            (ways * (k - 1) * (latency + given["nbytes"] / k * per_byte), 0, None)
        ]
        for which, graph in enumerate(given["candidates"]):
            weights = weights_of(graph, k)
            factor = absolute_eigenvalues(weights)[0]
            if factor < 1 - 1e-6:
                exact = math.log(given["tolerance"]) / math.log(max(factor, 1e-300))
                step = latency + heard(weights) * given["nbytes"] * per_byte
                times.append((max(1, whole(exact)) * step, which + 1, which))
        seconds, _, best = min(times)
        return {"seconds": seconds, "which": best}

    return oracle
