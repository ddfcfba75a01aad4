"""Programs and judges: mixing with neighbours, steps that mix, and how fast ranks agree."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from course_lib.checking import (
    Case,
    Expectation,
    Given,
    Wrong,
    calls_at_most,
    equals,
    only_calls,
    only_peers,
    sends_at_most,
    time_within,
)
from course_lib.checking.answers import ANYTHING, describe, sees
from course_lib.checking.judges import Oracle
from course_lib.checking.shared.memory import KEPT, OWN_MEMORY, addresses, memory_of
from course_lib.ranks import compute
from course_lib.ranks.costs.network import Network
from course_lib.ranks.explain.words import counted

# Mixing matrices, the neighbours under them, and the result of mixing -----------------------------

# A matrix is made of whole numbers over one denominator, so that it is exact on ranks of every
# dtype. In a graph with links, all links have the same weight: one over the largest number of
# neighbours plus one. These are not the weights that task 1 asks for.

HOPS: dict[str, tuple[int, ...]] = {
    "one way": (0, 1),
    "hops 0, 1, 3": (0, 1, 3),
    "swap": (1, -1),
    "turn": (1,),
    "half": (0, 0, 0, 1),
}
"""Directed graphs: a rank hears the ranks this many hops ahead of it, and itself if 0 is listed.

A hop that is listed several times counts several times. So "half" of two ranks has the rows
3/4, 1/4 and 1/4, 3/4, and their eigenvalue 1/2 is exact.
"""

HARDLY = 2**21
"""In the graph "hardly", a rank gives the next rank the weight 1 / `HARDLY`, below a millionth."""


def links_of(graph: str, k: int) -> list[tuple[int, int]]:
    """Return the links of a graph of k ranks, each once, the lower rank first."""
    pairs = {
        "line": [(i, i + 1) for i in range(k - 1)],
        "ring": [(i, (i + 1) % k) for i in range(k)],
        "star": [(0, i) for i in range(1, k)],
        "complete": [(i, j) for j in range(k) for i in range(j)],
        "pairs": [(i, i + 1) for i in range(0, k - 1, 2)],
        "hypercube": [(i, i ^ bit) for i in range(k) for bit in (1, 2, 4, 8) if i ^ bit < k],
        "alone": [],
    }
    return sorted({(min(a, b), max(a, b)) for a, b in pairs[graph] if a != b})


def whole_numbers(graph: str, k: int) -> tuple[Tensor, int]:
    """Return `(N, d)` for the matrix N / d, in whole numbers; row i has the weights of rank i.

    Graphs joined by ``*`` mean a product of matrices; ``star * one way`` is not normal.
    """
    if "*" in graph:
        product, denominator = torch.eye(k, dtype=torch.int64), 1
        for factor in graph.split(" * "):
            numbers, each = whole_numbers(factor, k)
            product, denominator = product @ numbers, denominator * each
        return product, denominator
    matrix = torch.zeros(k, k, dtype=torch.int64)
    if graph == "hardly":
        turn, _ = whole_numbers("turn", k)
        return turn + (HARDLY - 1) * torch.eye(k, dtype=torch.int64), HARDLY
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
    """Return the matrix that a rank gets, which is float64 with float64 tensors.

    With other tensors it is float32, or float64 if it is ``wide``, because one matrix must work
    with all tensors.
    """
    dtype = torch.float64 if matrix.get("wide") else torch.promote_types(like.dtype, torch.float32)
    return matrix["numbers"].to(like.device, dtype) / matrix["denominator"]


def watched_weights(given: Given, made: Sequence[Mapping[str, Any]], like: Tensor) -> list[Tensor]:
    """Return `as_weights` of each matrix; the student's function must not change them."""
    weights = [as_weights(matrix, like) for matrix in made]
    given.watch.add_parameters("the matrix", weights)
    return weights


def matrices(case: Case, rank: int) -> list[dict[str, Any]]:
    """Return the matrix of each step of ``graphs``, for `as_weights` on this rank.

    It is wide if the number of ranks is odd.
    """
    k = len(case.members(rank))
    made = [whole_numbers(graph, k) for graph in case.parameters["graphs"]]
    return [{"numbers": numbers, "denominator": d, "wide": k % 2 == 1} for numbers, d in made]


def neighbours(case: Case, rank: int) -> set[int]:
    """Return the ranks that `rank` hears, or that hear it, in some step."""
    members, found = case.members(rank), set()
    me = members.index(rank)
    for graph in case.parameters["graphs"]:
        numbers, _ = whole_numbers(graph, len(members))
        found |= {members[int(j)] for j in (numbers[me] + numbers[:, me]).nonzero()}
    return found - {rank}


def messages(case: Case, rank: int, dim: int) -> int:
    """Return how many messages a rank must send (`dim` 0), or receive (1), in all steps."""
    members = case.members(rank)
    me, total = members.index(rank), 0
    for graph in case.parameters["graphs"]:
        numbers, _ = whole_numbers(graph, len(members))
        numbers.fill_diagonal_(0)
        total += int((numbers > 0).sum(dim)[me])
    return total


def one_message_each(elements: Callable[[Case], int]) -> list[Expectation]:
    """Expect one message between neighbours in every step, with all messages in progress at once.

    A case may have ``seconds``, the time that a rank computes meanwhile in a step.
    `elements(case)` returns the number of elements of the tensors that are mixed.
    """

    def seconds(case: Case, network: Network) -> float:
        # 1.5 latencies leave time for the bytes, but not for a second message after the first.
        steps, busy = len(case.parameters["graphs"]), case.parameters.get("seconds", 0.0)
        return 1.01 * steps * max(busy, 1.5 * network.latency)

    once = (
        "In each step, send one message to each rank that hears this rank, and receive one from "
        "each rank that it hears."
    )
    return [
        only_calls("send", "recv"),
        only_peers(neighbours),
        calls_at_most(once, send=partial(messages, dim=0), recv=partial(messages, dim=1)),
        sends_at_most(
            lambda case, rank: messages(case, rank, dim=0) * elements(case) * case.itemsize,
            hint="Send only the tensors, once to each rank that hears this rank.",
        ),
        time_within(
            seconds,
            hint="Begin all messages, then compute, then wait. Then the messages travel during the "
            "computation.",
        ),
    ]


def mixed(change: Callable[[Tensor], Tensor] = lambda weights: weights) -> Oracle:
    """Return the oracle that mixes two tensors with a matrix; `change` makes a mistake in it."""

    def oracle(case: Case, inputs: Sequence[Any], me: int) -> dict[str, Tensor]:
        weights = change(weights_of(case.parameters["graphs"][0], len(inputs)))
        found = {}
        for name in ("tensor", "second tensor"):
            tensors = torch.stack([each[name].double().contiguous() for each in inputs])
            value = (weights[me] @ tensors.view(len(inputs), -1)).view(tensors.shape[1:])
            found[name] = value.to(inputs[me][name].dtype)
        return found

    return oracle


# Steps of decentralized SGD -----------------------------------------------------------------------

# A step mixes with the neighbours, and subtracts this rank's gradient at the weights before it.


def steps_inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Draw each rank's parameters of ``shapes``, and targets for each step, one of ``graphs``.

    The targets are larger by ``size``; those of the rank ``zeros`` are zero.
    """

    def draw() -> list[Tensor]:
        shapes = case.parameters["shapes"]
        return [torch.randn(shape, generator=generator, dtype=torch.double) for shape in shapes]

    made = []
    for rank in range(case.world_size):
        steps = matrices(case, rank)
        options = {key: case.parameters[key] for key in ("lr", "seconds", "unused", "before")}
        size = 0 if rank == case.parameters["zeros"] else case.parameters["size"]
        targets = [[size * each for each in draw()] for _ in steps]
        made.append({"values": draw(), "targets": targets, "matrices": steps, **options})
    return made


def steps_program(step: Callable[..., Any], mine: Any, given: Given) -> dict[str, Any]:
    """Take a step with each of the case's matrices; step t has the learning rate lr / (t + 1)."""
    params = [torch.nn.Parameter(value.clone()) for value in mine["values"]]
    for param in params if mine["before"] else ():
        param.grad = torch.ones_like(param)
    memory, calls = addresses(params), []
    matrices = watched_weights(given, mine["matrices"], params[0])
    for t, (targets, weights) in enumerate(zip(mine["targets"], matrices, strict=True)):

        def loss(targets: list[Tensor] = targets) -> Any:
            calls.append("loss")
            compute(mine["seconds"])
            pairs = enumerate(zip(params, targets, strict=True))
            return sum((p * p * t).sum() / 2 for i, (p, t) in pairs if i != mine["unused"])

        step(given.iterable(params), loss, mine["lr"] / (t + 1), weights, group=given.group)
    return {
        "parameter {}": [param.detach().clone() for param in params],
        "calls of loss()": len(calls),
        OWN_MEMORY: memory_of(params, memory),
    }


def steps_computes(own: Any) -> dict[float, int]:
    """Return the times that `steps_program` computes: once in each step."""
    return {own["seconds"]: len(own["matrices"])}


Step = Callable[[Tensor, Tensor, float, Callable[[Tensor], Tensor], Tensor], Tensor]
"""``step(W, X, η, gradient, old)`` → the next weights of all ranks from X, shape (K, n)."""


def stepped(step: Step) -> Oracle:
    """Return the oracle of some steps of training; a step's `old` is the earlier ``.grad``.

    The inputs have ``values``, the parameters w, and ``targets``, a list of tensors t for each
    step. The loss is the sum of w² t / 2; parameter ``unused`` is left out.
    """

    def oracle(case: Case, inputs: Sequence[Any], me: int) -> dict[str, Any]:
        graphs, mine = case.parameters["graphs"], inputs[me]
        shapes = [value.shape for value in mine["values"]]
        x = torch.stack([_flat(each["values"]) for each in inputs])
        used = [torch.full((s.numel(),), float(i != mine["unused"])) for i, s in enumerate(shapes)]
        old = torch.full_like(x, float(mine["before"]))
        for t, graph in enumerate(graphs):
            target = torch.stack([_flat(each["targets"][t]) for each in inputs])

            def gradient(x: Tensor, target: Tensor = target) -> Tensor:
                return torch.cat(used) * x * target

            new = step(weights_of(graph, len(inputs)), x, mine["lr"] / (t + 1), gradient, old)
            old, x = old + gradient(x), new
        new_weights = x[me].to(mine["values"][0].dtype)
        pieces = torch.split(new_weights, [shape.numel() for shape in shapes])
        return {
            "calls of loss()": len(graphs),
            "parameter {}": [p.view(shape) for p, shape in zip(pieces, shapes, strict=True)],
            OWN_MEMORY: KEPT,
        }

    return oracle


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.double().flatten() for tensor in tensors])


MISTAKES: dict[str, Step] = {
    "W(w - η g): do not mix the gradient": lambda w, x, lr, g, old: w @ (x - lr * g(x)),
    "a step with the gradient at the mixed weights: compute it at the weights before mixing": (
        lambda w, x, lr, g, old: w @ x - lr * g(w @ x)
    ),
    "a step with a gradient that was added to an older one: clear .grad before backward": (
        lambda w, x, lr, g, old: w @ x - lr * (g(x) + old)
    ),
}

equals_steps = equals(
    stepped(lambda w, x, lr, g, old: w @ x - lr * g(x)),
    {name: stepped(step) for name, step in MISTAKES.items()},
)
"""Judge the parameters after the steps, their memory, and how often the loss was called."""


# How fast ranks agree: weights for a graph, the spectral gap, the fastest graph -------------------

# The judge of weights looks for mistakes; the oracles compute from the matrices above.

_LINK = (
    "The weight of a link is 1/(1 + d): d is the larger number of neighbours of the link's two "
    "ranks."
)
_REST = "A rank's own share is 1 minus the weights of its links."


@sees(ANYTHING)  # the judge checks the form itself
def weighs_each_link(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
    """Judge the Metropolis weights of ``links`` among ``world_size`` ranks."""
    k, weights = case.parameters["world_size"], values[0]
    if not isinstance(weights, Tensor) or weights.shape != (k, k):
        raise Wrong(
            f"the answer is {describe(weights)}, expected a float64 tensor of shape [{k}, {k}]"
        )
    if weights.dtype != torch.float64:
        raise Wrong(f"the matrix has dtype {weights.dtype}, expected torch.float64")
    links = {frozenset(link) for link in case.parameters["links"]}
    between = {float(weights[i, j]) for i, j in map(sorted, links)}
    if case.form.iterable == "generator" and between in ({0.0}, {1.0}) and len(links) > 1:
        raise Wrong(
            f"each link has the weight {between.pop():.0f}",
            "Your code goes through the links twice, but a generator is empty after the first "
            "time. Begin with links = list(links).",
        )
    degree = [sum(i in link for link in links) for i in range(k)]
    for i in range(k):
        for j in range(k):
            got, linked = float(weights[i, j]), frozenset((i, j)) in links
            if i != j and not linked and got != 0:
                raise Wrong(
                    f"W[{i}, {j}] is {got:.6g}, expected 0, since ranks {i} and {j} are not linked"
                )
            if i != j and linked and not math.isclose(got * (1 + max(degree[i], degree[j])), 1):
                most = max(degree[i], degree[j])
                raise Wrong(
                    f"W[{i}, {j}] is {got:.6g}, expected 1/{1 + most}: rank {i} has "
                    f"{counted(degree[i], 'neighbour')}, rank {j} has {degree[j]}",
                    _LINK,
                )
    sums = weights.sum(1)  # the links are right, so the columns have the same sums
    wrong = (sums - 1).abs().nan_to_num(1.0) > 1e-9
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise Wrong(f"row {row} sums to {float(sums[row]):.6g}, expected 1", _REST)


def second(values: Tensor) -> float:
    """Return the second largest of these numbers and 0; with only one number, return 0."""
    return sorted([*values.tolist(), 0.0])[-2]


def second_eigenvalue(weights: Tensor) -> float:
    """Return |λ₂|, the second largest absolute eigenvalue."""
    return second(torch.linalg.eigvals(weights).abs())


def gap(of: Callable[[Tensor], float]) -> Oracle:
    """Return the oracle of a number of the matrix of ``graph`` with ``k`` ranks."""

    def oracle(case: Case, inputs: Sequence[Any], me: int) -> dict[str, float]:
        number = of(weights_of(case.parameters["graph"], case.parameters["k"]))
        return {"spectral gap": number if abs(number) > 1e-12 else 0.0}  # remove rounding

    return oracle


def chosen(
    heard_in: Literal["columns", "rows"] = "columns",
    pieces: int | None = None,
    whole: Callable[[float], int] = math.ceil,
) -> Oracle:
    """Return the oracle of the fastest among ``candidates``, or, with an argument, of a mistake.

    Args:
        heard_in: where the messages of a rank in a step are counted; it sends to those in its
            column.
        pieces: number of pieces of a tensor in the ring all-reduce, by default K; each message
            carries one piece.
        whole: rounds the exact number of steps.

    """

    def oracle(case: Case, inputs: Sequence[Any], me: int) -> dict[str, Any]:
        given, k = case.parameters, case.parameters["k"]
        latency, per_byte = given["latency"], 1 / given["bandwidth"]
        times: list[tuple[float, int, int | None]] = [
            (2 * (k - 1) * (latency + given["nbytes"] / (pieces or k) * per_byte), 0, None)
        ]
        for which, graph in enumerate(given["candidates"]):
            weights = weights_of(graph, k)
            factor = second_eigenvalue(weights)
            if factor < 1 - 1e-6:
                exact = math.log(given["tolerance"]) / math.log(max(factor, 1e-300))
                others = (weights > 0).fill_diagonal_(False).sum(0 if heard_in == "columns" else 1)
                step = latency + int(others.max()) * given["nbytes"] * per_byte
                times.append((max(1, whole(exact)) * step, which + 1, which))
        seconds, _, best = min(times)
        return {"seconds": seconds, "which": best}

    return oracle
