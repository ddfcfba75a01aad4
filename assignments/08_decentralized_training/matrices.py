"""The mixing matrices of the checks: whole numbers over one denominator, exact in every dtype.

They are not the matrices that task 1 asks for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from course_lib.checking import Draw, Given

Matrix = dict[str, Any]
"""``numbers`` (K, K), int64, over ``denominator``; row i has the weights with which i hears."""
Links = Iterable[tuple[int, int]]

HARDLY = 2**21
"""In the graph "hardly heard", the next rank has the weight 1 / `HARDLY`, below a millionth."""


def of_links(k: int, links: Links, spare: int = 1) -> Matrix:
    """Return a symmetric matrix; a link that is listed n times has n times the weight of a link.

    The rank with the most links keeps `spare` for itself, the others keep more.
    """
    numbers = torch.zeros(k, k, dtype=torch.int64)
    for i, j in links:
        if i != j:
            numbers[i, j] += 1
            numbers[j, i] += 1
    denominator = max(1, int(numbers.sum(1).max()) + spare)
    return {
        "numbers": numbers + torch.diag(denominator - numbers.sum(1)),
        "denominator": denominator,
    }


def of_hops(k: int, counts: Mapping[int, int]) -> Matrix:
    """Return the matrix in which each rank hears those some hops ahead, each count times."""
    numbers = torch.zeros(k, k, dtype=torch.int64)
    for hop, count in counts.items():
        numbers += count * torch.eye(k, dtype=torch.int64).roll(hop, 1)
    return {"numbers": numbers, "denominator": sum(counts.values())}


def product(a: Matrix, b: Matrix) -> Matrix:
    """Return the matrix that mixes with `b` first, and then with `a`."""
    return {
        "numbers": a["numbers"] @ b["numbers"],
        "denominator": a["denominator"] * b["denominator"],
    }


def ring(k: int) -> Matrix:
    return of_links(k, [(i, (i + 1) % k) for i in range(k)] if k > 2 else [(0, k - 1)])


def pairs(k: int) -> Matrix:
    return of_links(k, [(i, i + 1) for i in range(0, k - 1, 2)])


def star(k: int) -> Matrix:
    return of_links(k, [(0, i) for i in range(1, k)])


def unlike_links(d: Draw, k: int) -> Matrix:
    links = [(i, j) for j in range(k) for i in range(j) for _ in range(d.one_of(0, 0, 1, 2))]
    return of_links(k, links, spare=d.one_of(0, 1, 2))


def unlike_hops(d: Draw, k: int) -> Matrix:
    return of_hops(k, {0: 1, **{hop: d.one_of(0, 1, 2, 5) for hop in range(1, k)}})


def permutations(d: Draw, k: int) -> Matrix:
    """Return a mean of three permutations: any doubly stochastic matrix is such a mean."""
    numbers = torch.zeros(k, k, dtype=torch.int64)
    for _ in range(3):
        left = list(range(k))
        for rank in range(k):
            numbers[rank, left.pop(d.one_of(*range(len(left))))] += 1
    return {"numbers": numbers, "denominator": 3}


GRAPHS = {
    "a ring": lambda d, k: ring(k),
    "a line": lambda d, k: of_links(k, [(i, i + 1) for i in range(k - 1)]),
    "a lazy line": lambda d, k: of_links(k, [(i, i + 1) for i in range(k - 1)], spare=3),
    "a star": lambda d, k: star(k),
    "all with all": lambda d, k: of_hops(k, dict.fromkeys(range(k), 1)),
    "pairs": lambda d, k: pairs(k),
    "one way": lambda d, k: of_hops(k, {0: 1, 1: 1}),
    "hops 0, 1 and 3": lambda d, k: of_hops(k, {0: 1, 1: 1, 3: 1}),
    "hops 1 and 2": lambda d, k: of_hops(k, {1: 1, 2: 1}),
    "nothing of its own": lambda d, k: of_hops(k, {1: 1, -1: 1}),
    "each takes the next one's": lambda d, k: of_hops(k, {1: 1}),
    "nobody hears anybody": lambda d, k: of_hops(k, {0: 1}),
    "one way after a star": lambda d, k: product(of_hops(k, {0: 1, 1: 1}), star(k)),
    "pairs after one way": lambda d, k: product(pairs(k), of_hops(k, {0: 1, 1: 1})),
    "links of unlike weight": unlike_links,
    "hops of unlike weight": unlike_hops,
    "hardly heard": lambda d, k: of_hops(k, {0: HARDLY - 1, 1: 1}),
    "a mean of permutations": permutations,
}
"""Name → the matrix for K ranks, which may be drawn. K may be 1."""
WELL_CONDITIONED = tuple(GRAPHS)[:-2]
"""Graphs whose eigenvalues can be computed with nearly all digits."""


def drawn_matrices(d: Draw, names: Sequence[str]) -> list[list[Matrix]]:
    """Return, for each rank, the matrices of its group, one for each name."""
    by_group = {m: [GRAPHS[name](d, len(m)) for name in names] for m in d.groups}
    return [by_group[d.members(rank)] for rank in d.ranks]


def all_keep_some(matrices: Sequence[Sequence[Matrix]]) -> bool:
    """Return whether each rank hears itself in all matrices.

    Else its inf may be lost or become 0 · inf = NaN: both are right.
    """
    return all(bool(m["numbers"].diagonal().all()) for rows in matrices for m in rows)


def as_weights(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    return (matrix["numbers"].double() / matrix["denominator"]).to(dtype)


def watched_weights(case: Given, matrices: Sequence[Matrix], dtype: torch.dtype) -> list[Tensor]:
    """Return the weights on a rank; the student's function must not change them."""
    weights = [as_weights(matrix, dtype) for matrix in matrices]
    case.watch.add_parameters("the matrix", weights)
    return weights


def eigenvalues(matrix: Matrix) -> Tensor:
    return torch.linalg.eigvals(as_weights(matrix, torch.float64))


def second_largest(numbers: Tensor) -> float:
    """Return the second largest of the numbers and 0; of one number, 0."""
    return sorted([*numbers.tolist(), 0.0])[-2]


def steps_and_receivers(matrix: Matrix, tolerance: float) -> tuple[int, int]:
    """Return how many steps mixing takes, and to how many others a rank sends at most.

    There are 0 steps if the ranks never agree. It is (-1, 0) if rounding decides about the steps.
    """
    factor, numbers = second_largest(eigenvalues(matrix).abs()), matrix["numbers"]
    if factor > 1 - 1e-9:
        return 0, 0
    # The only eigenvalue of two ranks is 2a - 1, if a is a rank's own share: it is not rounded.
    by = 1e-9 if len(numbers) == 2 else 5e-6
    lower, upper = (
        max(1, math.ceil(math.log(tolerance) / math.log(max(5e-6, factor + moved)) - 1e-6))
        for moved in (-by, by)
    )
    if lower < upper or factor > 1 - 1e-3:
        return -1, 0
    return lower, int(((numbers != 0).sum(0) - (numbers.diag() != 0).long()).max())


def no_two_alike(matrices: Sequence[Matrix], tolerance: float) -> bool:
    """Return whether no two of the matrices need equally long, and rounding decides nothing."""
    costs = [steps_and_receivers(matrix, tolerance) for matrix in matrices]
    agreeing = [cost for cost in costs if cost[0]]
    return (-1, 0) not in costs and len(set(agreeing)) == len(agreeing)
