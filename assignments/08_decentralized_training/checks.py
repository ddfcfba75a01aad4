"""The checks of this assignment. They are handed out: read them if a message is not enough.

A check has a reference in `course_lib`, a program that calls a function on a rank, and a draw that
makes a case from a seed. A program gets only its rank's input. The mixing matrices of tasks 2 to 5
are in `matrices.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from course_lib.checking import Allowed, Case, Draw, Given, Variety, by_reference, expect_equal
from course_lib.checking.on_ranks.given import expect_function, expect_pair
from course_lib.ranks import compute
from course_lib.ranks.explain.words import counted

from .matrices import (
    GRAPHS,
    WELL_CONDITIONED,
    Matrix,
    all_keep_some,
    as_weights,
    drawn_matrices,
    eigenvalues,
    no_two_alike,
    second_largest,
    steps_and_receivers,
    watched_weights,
)

RANKS = (2, 3, 4, 3, 5, 1, 6)
BOTH = ("float32", "float64")
SECONDS = 100e-6  # that a rank computes while its messages travel

# Task 1: weights for a graph ----------------------------------------------------------------------


def draw_links(d: Draw) -> list[Any]:
    """Draw the links of a graph: a usual one, or any links."""
    k = d.one_of(2, 3, 4, 5, 6, 7)
    graphs = {
        "a line": [(i, i + 1) for i in range(k - 1)],
        "a star": [(0, i) for i in range(1, k)],
        "a ring": [(i, (i + 1) % k) for i in range(k) if k > 2],
        "a tree": [((i - 1) // 2, i) for i in range(1, k)],
        "all with all": [(i, j) for j in range(k) for i in range(j)],
        "any links": [(i, j) for j in range(k) for i in range(j) if d.one_of(True, False)],
    }
    name = d.one_of(*graphs, "any links")
    d.say(f"{name}, {counted(k, 'rank')}")
    links = d.maybe("but no links", [], graphs[name], one_in=6)
    if links and d.maybe("some links the other way", one_in=2):
        links = [link if d.one_of(True, False) else link[::-1] for link in links]
    if links and d.maybe("links that are listed twice", one_in=2):
        links = [link for link in links for _ in range(d.one_of(1, 2))]
        links.append(links[0][::-1])
    if d.maybe("one rank more, without a link"):
        k += 1
    return [{"links": links, "world_size": k, "iterable": d.form.iterable}]


def run_links(metropolis_weights: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Call ``metropolis_weights(links, world_size)``, after a call for all links."""
    k, links = inputs["world_size"], case.iterable([tuple(link) for link in inputs["links"]])
    metropolis_weights([(i, j) for j in range(k) for i in range(j)], k)
    weights = metropolis_weights(links, k)
    left = list(map(list, links)) if isinstance(links, list) else inputs["links"]
    return {"W": weights, "the list of links after the call": [list(link) for link in left]}


def with_links(weight: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """Return the mistake of links with ``weight(d, other)``, for a rank of d and one of `other`."""

    def mistake(inputs: Sequence[Any], me: int, expected: Sequence[Any]) -> Any:
        linked = expected[me]["W"].clone().fill_diagonal_(0) != 0
        degree = linked.sum(1).double()
        weights = torch.where(linked, weight(degree[:, None], degree), 0)
        return {"W": weights + torch.diag(1 - weights.sum(1))}

    return mistake


WEIGHT_MISTAKES = {
    "weights of 1/(1 + d) with the row's own d: d is the larger number of neighbours of the two "
    "ranks of a link": with_links(lambda d, other: 1 / (1 + d) + 0 * other),
    "weights of 1/d: the weight of a link is 1/(1 + d)": with_links(
        lambda d, other: 1 / torch.maximum(d, other)
    ),
    "the weights of the links alone. A rank's own share is 1 minus the weights of its links": (
        lambda inputs, me, expected: {"W": expected[me]["W"].clone().fill_diagonal_(0)}
    ),
}

# Task 2: mixing -----------------------------------------------------------------------------------


def draw_mixing(d: Draw) -> list[Any]:
    """Draw two tensors for every rank, which are mixed at once, each with a matrix."""
    graph = d.one_of(*GRAPHS)
    d.say(graph)
    second_graph = d.maybe("two matrices", d.one_of(*GRAPHS), graph, one_in=4)
    matrices = drawn_matrices(d, [graph, second_graph])
    shape = d.one_of((3, 2), (4,), (5, 2), (2, 3))
    shape = d.maybe("a single number", (), shape, one_in=6)
    shape = d.maybe("no numbers", (0, 3), shape, one_in=6)
    second_shape = d.maybe("two shapes", (3,), shape, one_in=4)
    size = d.maybe("large numbers", 300.0, 1.0, one_in=4)
    zeros = d.rank("only zeros on rank {}")
    overflow = -1
    if all_keep_some(matrices) and shape != (0, 3):
        overflow = d.rank("rank {} has an inf or a NaN", one_in=2)
    dtype = d.one_of(*BOTH)

    def drawn(rank: int, shape: tuple[int, ...]) -> Tensor:
        tensor = size * (rank != zeros) * d.randn(*shape)
        return d.not_finite(tensor) if rank == overflow else tensor

    return [
        {
            "tensors": [drawn(rank, shape), drawn(rank, second_shape)],
            "matrices": matrices[rank],
            "matrix dtype": dtype,
        }
        for rank in d.ranks
    ]


def run_mixing(start_mixing: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Mix two tensors at once: start the second before the first is finished."""
    weights = watched_weights(case, inputs["matrices"], getattr(torch, inputs["matrix dtype"]))
    finishes = []
    for tensor, matrix in zip(inputs["tensors"], weights, strict=True):
        finish = start_mixing(tensor, matrix, group=case.group)
        finishes.append(expect_function(finish, "what start_mixing returns"))
        compute(SECONDS)
    first, second = (finish() for finish in finishes)
    return {"tensor": first, "second tensor": second}


def with_numbers(change: Callable[[Matrix], Tensor]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return the mistake whose result is the right one for other matrices."""
    return lambda inputs: [
        {**member, "matrices": [{**m, "numbers": change(m)} for m in member["matrices"]]}
        for member in inputs
    ]


MIXING_AS_IF = {
    "mixing with a column of the matrix: rank i needs row i": with_numbers(
        lambda m: m["numbers"].T
    ),
    "mixing with this rank's own tensor at weight 1: its weight is W[i, i]": with_numbers(
        lambda m: m["numbers"].clone().fill_diagonal_(m["denominator"])
    ),
    "mixing without ranks of tiny weight: hear every rank whose weight is not 0": with_numbers(
        lambda m: m["numbers"] * (1000 * m["numbers"] > m["denominator"])
    ),
}

ONE_MESSAGE_EACH = Allowed(
    time=1.02,
    hint="In each step, send one message to each rank that hears this rank, and receive one from "
    "each rank that it hears. Begin all messages, then compute, then wait: then the messages "
    "travel during the computation.",
)

# Task 3: a step of decentralized SGD --------------------------------------------------------------

STEPPED = "after step {}, parameter {}"


def draw_steps(d: Draw) -> list[Any]:
    """Draw each rank's parameters w, and targets t for some steps: the loss is Σ w² t / 2."""
    steps, graph = d.one_of(1, 2, 2, 3), d.one_of(*GRAPHS)
    d.say(f"{graph}, {counted(steps, 'step')}")
    later = [d.one_of(*GRAPHS) for _ in range(steps - 1)]
    names = later and d.maybe("another matrix in each step", later, [graph] * (steps - 1))
    matrices = drawn_matrices(d, [graph, *names])
    overflow = d.rank("rank {} has an inf or a NaN", one_in=2) if all_keep_some(matrices) else -1
    shapes = d.one_of([(3, 2), (4,)], [(4,), (2, 2), ()], [(2, 3), (1,)], [(2, 3), (2, 3)])
    shapes = d.maybe("an empty parameter", [*shapes, (0,)], shapes)
    shapes = d.maybe("only one parameter", [(5, 2)], shapes, one_in=6)
    unused = shapes[1:] and d.maybe("nobody uses the first parameter")
    unused_on = d.rank("rank {} does not use the first parameter") if shapes[1:] else -1
    before = d.maybe(".grad is not empty")
    size, zeros = d.maybe("large gradients", 300.0, 1.0), d.rank("no gradient on rank {}")
    lr, dtype = d.one_of(0.5, 0.3, 0.1, 0.003), d.one_of(*BOTH)
    inputs = []
    for rank in d.ranks:
        scale = 0.0 if rank == zeros else size
        targets = [[scale * d.randn(*shape) for shape in shapes] for _ in range(steps)]
        if rank == overflow:
            place = min(1, len(shapes) - 1)
            targets[0][place] = d.not_finite(targets[0][place])
        inputs.append(
            {
                "values": [d.randn(*shape) for shape in shapes],
                "targets": targets,
                "matrices": matrices[rank],
                "matrix dtype": dtype,
                "lr": [lr / (step + 1) for step in range(steps)],
                "first is unused": bool(unused) or rank == unused_on,
                "before": before,
            }
        )
    return inputs


def run_steps(step: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Take a step with each matrix; return the parameters after each step."""
    params = [torch.nn.Parameter(value) for value in inputs["values"]]
    for param in params if inputs["before"] else ():
        param.grad = torch.ones_like(param)
    calls, after = list[str](), list[Any]()
    case.watch.add_memory(params)
    case.watch.add_parameters("the parameters", params, values=False)
    matrices = watched_weights(case, inputs["matrices"], getattr(torch, inputs["matrix dtype"]))
    for targets, lr, weights in zip(inputs["targets"], inputs["lr"], matrices, strict=True):

        def loss(targets: list[Tensor] = targets) -> Any:
            calls.append("loss")
            compute(SECONDS)
            terms = [(p * p * t).sum() / 2 for p, t in zip(params, targets, strict=True)]
            return sum(terms[inputs["first is unused"] :])

        step(case.iterable(params), loss, lr, weights, group=case.group)
        after.append([param.detach().clone() for param in params])
    return {
        "calls of loss()": len(calls),
        STEPPED: after,
    }


def mistaken(step: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return the mistake of ``step(W, w, η, t, older)``, if all steps before it were right.

    w and t have a row for each rank, so that the gradients are t w; `older` are those before.
    """

    def mistake(inputs: Sequence[Any], me: int, expected: Sequence[Any]) -> Any:
        weights = [[m["values"], *r[STEPPED]] for m, r in zip(inputs, expected, strict=True)]
        steps = zip(inputs[me]["lr"], inputs[me]["matrices"], strict=True)
        older = [float(inputs[me]["before"])] * len(inputs[me]["values"])
        after: list[list[Tensor]] = []
        for n, (lr, matrix) in enumerate(steps):
            after.append([])
            for i, value in enumerate(inputs[me]["values"]):
                w = torch.stack([rows[n][i].double().flatten() for rows in weights])
                used = [(i > 0 or not m["first is unused"]) * m["targets"][n][i] for m in inputs]
                t = torch.stack([target.double().flatten() for target in used])
                new = step(as_weights(matrix, torch.float64), w, lr, t, older[i])[me]
                after[n].append(new.view_as(value).to(value.dtype))
                older[i] = t * w
        return {STEPPED: after}

    return mistake


STEP_MISTAKES = {
    "W(w - η g): do not mix the gradient": mistaken(lambda W, w, lr, t, _: W @ (w - lr * t * w)),
    "a step with the gradient at the mixed weights: compute it at the weights before mixing": (
        mistaken(lambda W, w, lr, t, older: W @ w - lr * t * (W @ w))
    ),
    "a step with a gradient that was added to an older one: clear .grad before backward": mistaken(
        lambda W, w, lr, t, older: W @ w - lr * (t * w + older)
    ),
}

# Task 4: how fast they agree ----------------------------------------------------------------------


def draw_gap(d: Draw) -> list[Any]:
    """Draw two matrices of one size, whose eigenvalues are well conditioned."""
    k = d.maybe("one rank alone", 1, d.one_of(2, 3, 4, 5, 6, 7, 8, 9), one_in=6)
    graphs = [d.one_of(*WELL_CONDITIONED) for _ in range(2)]
    d.say(f"{k} × {k}: {' and '.join(graphs)}")
    return [{"matrices": [GRAPHS[graph](d, k) for graph in graphs], "like": torch.ones(1)}]


def run_gap(spectral_gap: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Call ``spectral_gap(weights)`` for two matrices; the judge allows the task's tolerance."""
    weights = watched_weights(case, inputs["matrices"], inputs["like"].dtype)
    return {"gap of matrix {}": [spectral_gap(matrix) for matrix in weights]}


GAP_MISTAKES: dict[str, Callable[[Tensor], float]] = {
    "|λ₂|, the second largest of the absolute values: the gap is 1 - |λ₂|": (
        lambda spectrum: second_largest(spectrum.abs())
    ),
    "1 minus a real part: for a complex eigenvalue, |λ| = √(re² + im²)": (
        lambda spectrum: 1 - second_largest(spectrum.real.abs())
    ),
    "1 minus the second largest eigenvalue with its sign: take the second largest absolute value": (
        lambda spectrum: 1 - second_largest(spectrum.real)
    ),
}


def within_tolerance(case: Case, inputs: Any, expected: Any, values: Sequence[Any]) -> None:
    """Judge the gaps with the tolerance that the task's text promises."""
    spectra = [eigenvalues(matrix) for matrix in inputs[0]["matrices"]]
    gaps = [round(gap, 12) for gap in expected[0]["gap of matrix {}"]]  # of 1e-16, 0 is left
    errors = {}
    for n, gap in enumerate(gaps):
        in_float32 = 1e-3 * gap if gap else 1e-4
        errors[f"gap of matrix {n}"] = 1e-9 if case.form.dtype == "float64" else in_float32
    mistakes = {label: [of(spectrum) for spectrum in spectra] for label, of in GAP_MISTAKES.items()}
    if case.after is None:
        mistakes["the gap of the matrix before: keep nothing between calls"] = gaps[:1] * 2
    lookalikes = [(label, {"gap of matrix {}": pair}) for label, pair in mistakes.items()]
    right = {"gap of matrix {}": gaps}
    expect_equal(values[0], right, "rank 0", rtol=0, atol=0, errors=errors, lookalikes=lookalikes)


# Task 5: which graph is the fastest ---------------------------------------------------------------

ARGUMENTS = ("nbytes", "latency", "bandwidth", "tolerance")

UNUSUAL_CHOICES = {
    # The second eigenvalue of a lazy line of two ranks is 1/2, exactly.
    "a power of the eigenvalue equals the tolerance": {
        "graphs": ["a lazy line"],
        "others": (0,),
        "ranks": (2,),
        "tolerances": (0.5, 0.5, 0.25),
    },
    "40 ranks": {"ranks": (40,)},
    "any mean will do": {"tolerances": (1.0,)},
    "one never agrees": {"graphs": ["pairs"], "ranks": (3, 4, 5, 6, 7, 8)},
    "none agrees": {"graphs": ["each takes the next one's"], "others": (0,)},
    "a rank sends to more than it hears": {"graphs": ["pairs after one way"], "others": (0, 0, 1)},
    "no rank has a share of its own": {"graphs": ["hops 1 and 2"], "others": (0, 0, 1)},
}
USUAL_CHOICE = {
    "graphs": [],
    "others": (1, 2, 3),
    "ranks": (2, 3, 4, 5, 6, 7, 8, 16),
    "tolerances": (0.9, 0.7, 0.3, 0.1, 0.01, 1e-6),
}


def draw_choice(d: Draw) -> list[Any]:
    """Draw matrices and a network on which no two choices take equally long."""
    feature = d.one_of(*UNUSUAL_CHOICES)
    choice = USUAL_CHOICE | d.maybe(feature, UNUSUAL_CHOICES[feature], {}, one_in=1)
    while True:
        k, tolerance = d.one_of(*choice["ranks"]), d.one_of(*choice["tolerances"])
        usual = [d.one_of(*WELL_CONDITIONED) for _ in range(d.one_of(*choice["others"]))]
        names = [*choice["graphs"], *usual][:: d.one_of(1, -1)]
        matrices = [GRAPHS[name](d, k) for name in names]
        if no_two_alike(matrices, tolerance):
            break
    d.say(f"{k} × {k}: {', '.join(names)}")
    latency, bandwidth = d.one_of((1e-6, 1.7e6), (20e-6, 1e9), (1e-3, 1e9), (10e-3, 1e8))
    # The bytes of a message take so many latencies: no whole number, so there are no ties.
    nbytes = max(1, round(latency * bandwidth * d.one_of(0.0137, 0.0371, 0.193, 1.37, 17.13)))
    numbers = dict(zip(ARGUMENTS, (nbytes, latency, bandwidth, tolerance), strict=True))
    return [{"matrices": matrices, "like": torch.ones(1), **numbers}]


def run_choice(choose_graph: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Call ``choose_graph(candidates, …)``; return which graph it takes, and the seconds."""
    weights = watched_weights(case, inputs["matrices"], inputs["like"].dtype)
    candidates = case.iterable(weights)
    answer = choose_graph(candidates, *(inputs[key] for key in ARGUMENTS))
    which, seconds = expect_pair(answer, "choose_graph", "(which, seconds)")
    left = len(candidates) if isinstance(candidates, list) else len(weights)
    return {"seconds": seconds, "which": which, "candidates in the list after the call": left}


def fastest(less: int = 0, whole_tensors: bool = False) -> Callable[..., Any]:
    """Return the mistake of taking `less` steps, or of a ring that sends `whole_tensors`."""

    def mistake(inputs: Sequence[Any], me: int, expected: Sequence[Any]) -> Any:
        member, k = inputs[0], len(inputs[0]["matrices"][0]["numbers"])
        latency, of_tensor = member["latency"], member["nbytes"] / member["bandwidth"]
        ring = 2 * (k - 1) * (latency + of_tensor / (1 if whole_tensors else k))
        seconds: dict[int | None, float] = {None: ring}
        for choice, matrix in enumerate(member["matrices"]):
            steps, receivers = steps_and_receivers(matrix, member["tolerance"])
            if steps:
                seconds[choice] = max(1, steps - less) * (latency + receivers * of_tensor)
        choice = min(seconds, key=lambda choice: seconds[choice])
        return {"seconds": seconds[choice], "which": choice}

    return mistake


CHOICE_MISTAKES = {
    "the time of one step less: round T up": fastest(less=1),
    "the time of a ring all-reduce with messages of n bytes: each has n/K bytes": fastest(
        whole_tensors=True
    ),
}
ROWS_FOR_COLUMNS = (
    "the time if you count row i, the ranks that rank i hears: count column i, the ranks that it "
    "sends to"
)

# The checks ---------------------------------------------------------------------------------------

ALONE = Variety(ranks=(1,), dtypes=BOTH, layouts=("transposed",), groups=False)

CHECKS = {
    "metropolis_weights": by_reference(
        "metropolis_weights",
        seeds=(0, 1, 2, 3, 14, 20),
        reference="course_lib.decentralized:metropolis_weights",
        program=run_links,
        draw=draw_links,
        variety=Variety(ranks=(1,), dtypes=("float64",), layouts=(), groups=False),
        mistakes=WEIGHT_MISTAKES,
    ),
    "start_mixing": by_reference(
        "start_mixing",
        seeds=(1, 6, 11, 12, 15, 21, 28, 31, 44, 45, 46, 62),
        reference="course_lib.decentralized:start_mixing",
        program=run_mixing,
        draw=draw_mixing,
        variety=Variety(ranks=RANKS, dtypes=BOTH),
        as_if=MIXING_AS_IF,
        allowed=ONE_MESSAGE_EACH,
        worth={"values": 2, "communication": 2},
    ),
    "decentralized_step": by_reference(
        "decentralized_step",
        seeds=(1, 3, 6, 8, 9, 14, 17, 23, 28, 39, 44, 46, 54, 56, 59),
        reference="course_lib.decentralized:decentralized_step",
        program=run_steps,
        draw=draw_steps,
        variety=Variety(ranks=RANKS, dtypes=BOTH),
        mistakes=STEP_MISTAKES,
        may_change=["values"],
        allowed=ONE_MESSAGE_EACH,
        worth={"values": 2, "communication": 2},
    ),
    "spectral_gap": by_reference(
        "spectral_gap",
        seeds=(1, 6, 7, 11, 13, 16, 20, 23),
        reference="course_lib.decentralized:spectral_gap",
        program=run_gap,
        draw=draw_gap,
        variety=ALONE,
        judge=within_tolerance,
    ),
    "choose_graph": by_reference(
        "choose_graph",
        seeds=(4, 6, 9, 13, 17, 22, 26, 28, 30, 31, 34, 41, 46, 47, 49, 50, 58),
        reference="course_lib.decentralized:choose_graph",
        program=run_choice,
        draw=draw_choice,
        variety=ALONE,
        mistakes=CHOICE_MISTAKES,
        as_if={ROWS_FOR_COLUMNS: with_numbers(lambda matrix: matrix["numbers"].T)},
    ),
}
