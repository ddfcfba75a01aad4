"""The checks of this assignment. They are handed out: read them if a message is not enough.

A check has a reference in `course_lib`, a program that calls a function on a rank, and a draw that
makes a case from a seed. A program gets only its rank's input.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib.checking import Allowed, Draw, Given, Variety, by_reference, sends_at_most
from course_lib.checking.on_ranks.given import linear_of
from course_lib.checking.on_ranks.leaves import with_tensors
from course_lib.checking.testing import Candidate, testing_task

# Task 1: each rank holds some of the elements -----------------------------------------------------


def run_bounds(shard_bounds: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Compute the bounds of every rank, for each pair (length, world size) of ``questions``.

    One rank runs this, because nothing is communicated. It begins with the last rank, so that a
    function cannot reuse a result of the rank before.
    """

    def bounds(length: int, k: int, rank: int) -> Any:
        answer = shard_bounds(length, k, rank)
        answer = answer.tolist() if isinstance(answer, np.ndarray) else answer
        pair = isinstance(answer, tuple | list) and len(answer) == 2
        if not pair or any(not isinstance(bound, int | np.integer) for bound in answer):
            call = bounds_of(length, k).format(rank)
            raise TypeError(f"{call} is {answer!r:.60}, expected two ints (start, stop)")
        return without_place(*map(int, answer))

    return {
        bounds_of(length, k): [bounds(length, k, rank) for rank in reversed(range(k))][::-1]
        for length, k in inputs["questions"]
    }


def bounds_of(length: int, k: int) -> str:
    return f"shard_bounds({length}, {k}, {{}})"


def without_place(start: int, stop: int) -> str:
    """Return the bounds as text; an empty shard may be anywhere."""
    return "an empty shard" if start == stop else str((start, stop))


def bounds_if(bounds: Callable[[int, int, int], tuple[int, int]]) -> Callable[..., Any]:
    """Return the mistake of a function that gives these bounds."""
    return lambda inputs, me, expected: {
        bounds_of(length, k): [without_place(*bounds(length, k, rank)) for rank in range(k)]
        for length, k in inputs[0]["questions"]
    }


def with_last_element(inputs: Sequence[Any], me: int, expected: Sequence[Any]) -> Any:
    def bounds(length: int, k: int, rank: int) -> tuple[int, int]:
        # By the usual formula, an empty shard is at the end.
        numbers = re.findall(r"\d+", expected[0][bounds_of(length, k)][rank]) or (length, length)
        return int(numbers[0]), int(numbers[1]) - 1

    return bounds_if(bounds)(inputs, me, expected)


BOUNDS_MISTAKES = {
    "bounds with the last element as the stop. A stop is not part of its shard: [start, stop), as "
    "in x[start:stop]": with_last_element,
    "shards of length // world_size elements: the elements that the division leaves over belong to "
    "nobody": bounds_if(lambda length, k, rank: (rank * (length // k), (rank + 1) * (length // k))),
    "shards of which the last takes what the division leaves over. Sizes may differ by one at most,"
    " and the first ranks take the extra elements": bounds_if(
        lambda length, k, rank: (
            rank * (length // k),
            length if rank == k - 1 else (rank + 1) * (length // k),
        )
    ),
}


def draw_bounds(d: Draw) -> list[Any]:
    """Draw some lengths and world sizes: lengths that divide, and short ones."""
    short = d.maybe("fewer elements than ranks")
    uneven = not short and d.maybe("lengths that do not divide", one_in=2)
    long = d.maybe("long datasets", one_in=4)
    questions = []
    for _ in range(5):
        k = d.one_of(1, 2, 3, 4, 5, 7)
        parts = d.one_of(1, 2, 3, 5) * k
        length = d.one_of(*range(k)) if short else parts + d.one_of(*range(k)) if uneven else parts
        questions.append((length, k))
    if long:
        questions.append(d.one_of((60_000, 64), (1_281_167, 8)))
    questions.append((questions[0][0], 1))  # finds a function that keeps results by length
    return [{"questions": questions}]


# Task 2: the mean of gradients --------------------------------------------------------------------


def draw_gradients(d: Draw) -> list[Any]:
    """Draw the same weights for every rank, and different gradients."""
    shapes = d.one_of([(3, 2), (5,), ()], [(4,), (2, 3)], [(3, 2), (3, 2), (6,)])
    if d.maybe("an empty parameter"):
        shapes = [*shapes[:1], (0,), *shapes[1:]]
    places = range(len(shapes))
    frozen = [d.one_of(*places)] if d.maybe("a frozen parameter") else []
    doubles = [d.one_of(*places)] if d.maybe("two dtypes") else []
    size = d.maybe("large gradients", 300.0, 1.0)
    zeros, overflow = d.rank("only zeros on rank {}"), d.rank("rank {} has an inf or a NaN")
    weights = [d.randn(*shape) for shape in shapes]

    def gradients_of(rank: int) -> list[Tensor | None]:
        drawn = [size * (rank != zeros) * d.randn(*shape) for shape in shapes]
        if rank == overflow:
            drawn[0] = d.not_finite(drawn[0])
        return [None if i in frozen else gradient for i, gradient in enumerate(drawn)]

    return [
        {"weights": weights, "gradients": gradients_of(rank), "doubles": doubles}
        for rank in d.ranks
    ]


def run_average(average: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Call ``average(params, group=group)`` with these gradients; return the gradients after it."""
    params = []
    pairs = zip(inputs["weights"], inputs["gradients"], strict=True)
    for i, (weight, gradient) in enumerate(pairs):
        wide = torch.float64 if i in inputs["doubles"] else weight.dtype
        params.append(nn.Parameter(weight.to(wide), requires_grad=gradient is not None))
        params[-1].grad = None if gradient is None else gradient.to(wide)
    case.watch.add_parameters("the parameters", params)
    average(case.iterable(params), group=case.group)
    return {"gradient of parameter {}": [param.grad for param in params]}


def bytes_as_float64(inputs: Any) -> int:
    """Return the bytes more if torch.cat makes one vector of gradients of two dtypes."""
    if not inputs["doubles"]:
        return 0
    return sum((8 - g.itemsize) * g.numel() for g in inputs["gradients"] if g is not None)


def scaled(factor: Callable[[int], float]) -> Callable[..., Any]:
    """Return the mistake that gives `factor(K)` times the mean."""
    return lambda inputs, me, expected: with_tensors(
        expected[me], lambda mean: factor(len(inputs)) * mean
    )


def own_parts(inputs: Sequence[Any], me: int, expected: Sequence[Any]) -> Any:
    parts = with_tensors(inputs[me]["gradients"], lambda gradient: gradient / len(inputs))
    return {"gradient of parameter {}": parts}


MEAN_MISTAKES = {
    "the sum over the ranks, not the mean": scaled(lambda k: k),
    "the mean divided by the number of ranks a second time": scaled(lambda k: 1 / k),
    "this rank's own gradient divided by the number of ranks: the sum did not arrive here (reduce "
    "gives the sum to one rank, all_reduce to all ranks)": own_parts,
}

# Task 3: a step of all ranks' rows ----------------------------------------------------------------

FEATURES, WIDTH, CLASSES, STEPS = 32, 16, 3, 2
SHAPES = ((WIDTH, FEATURES), (WIDTH,), (CLASSES, WIDTH), (CLASSES,))
LABELS = ("cross_entropy", "nll_loss", "multi_margin_loss")
COLLECTIVES = ("all_gather", "broadcast", "reduce", "gather", "scatter", "all_to_all")
EXTRA = 512  # bytes that a rank may send in a step for counts and losses


def draw_step(d: Draw) -> list[Any]:
    """Draw the same weights for every rank, and different rows, for two steps."""
    loss = d.one_of("cross_entropy", "mse_loss", "smooth_l1_loss", "nll_loss")
    filled = d.maybe(".grad is not empty")
    norm = d.maybe("with BatchNorm")
    # With BatchNorm, rows of zeros have a variance of 0, which amplifies every rounding.
    zeros = -1 if norm else d.rank("rank {} has rows of zeros")
    large = loss == "mse_loss" and d.maybe("large errors")
    lr = 1e-4 if large else d.one_of(0.1, 0.2, 0.3, 0.6)
    weights = [0.3 * d.randn(*shape) for shape in SHAPES]
    before = [d.randn(*shape) for shape in SHAPES] if filled else None
    ranks_inputs = []
    for rank in d.ranks:
        rows = d.one_of(*range(4 if norm else 1, 9))
        x = [d.randn(rows + step, FEATURES) * (rank != zeros) for step in range(STEPS)]
        scores = [(3000 if large else 1) * d.randn(len(batch), CLASSES) for batch in x]
        y = [score.argmax(1) if loss in LABELS else score for score in scores]
        ranks_inputs.append(
            {"weights": weights, "before": before, "x": x, "y": y, "loss": loss, "norm": norm}
            | {"lr": [lr, 0.7 * lr]}
        )
    return ranks_inputs


def run_steps(step: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Call ``step(model, loss_fn, x, y, lr, group=group)`` twice; return weights and losses."""
    params = [nn.Parameter(weight.clone()) for weight in inputs["weights"]]
    dtype = inputs["weights"][0].dtype
    norm = nn.BatchNorm1d(WIDTH, affine=False, dtype=dtype) if inputs["norm"] else nn.Tanh()
    model = case.model(nn.Sequential(linear_of(*params[:2]), norm, linear_of(*params[2:])))
    for param, gradient in zip(model.parameters(), inputs["before"] or [None] * 4, strict=True):
        param.grad = None if gradient is None else gradient.clone()
    loss_fn = getattr(F, inputs["loss"])
    losses, weights = [], []
    for x, y, lr in zip(inputs["x"], inputs["y"], inputs["lr"], strict=True):
        losses.append(step(model, loss_fn, x, y, lr, group=case.group))
        weights.append([param.detach().clone() for param in model.parameters()])
    return {
        "loss returned by step {}": losses,
        "after step {}, parameter {}": weights,
        "buffer {} after both steps": [buffer.clone() for buffer in model.buffers()],
    }


def as_many_rows(inputs: Sequence[Any]) -> Sequence[Any]:
    """Repeat each rank's rows until all ranks have equally many, so all count the same."""
    full = [math.lcm(*(len(member["x"][step]) for member in inputs)) for step in range(STEPS)]

    def repeated(batches: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(batches, full, strict=True)
        return [rows.repeat_interleave(count // len(rows), dim=0) for rows, count in pairs]

    return [{**member, "x": repeated(member["x"]), "y": repeated(member["y"])} for member in inputs]


def with_older_gradient(times: Callable[[int], float]) -> Callable[..., Any]:
    """Return the mistake that adds the first step's gradient to the second's, `times(K)` times."""

    def mistake(inputs: Sequence[Any], me: int, expected: Sequence[Any]) -> Any:
        first, second = inputs[me]["lr"]
        after_1, after_2 = expected[me]["after step {}, parameter {}"]
        factor = times(len(inputs)) * second / first
        moved = (
            later - factor * (before - after)
            for before, after, later in zip(inputs[me]["weights"], after_1, after_2, strict=True)
        )
        return {"after step {}, parameter {}": [after_1, list(moved)]}

    return mistake


OLDER = "a step with an older gradient in it, too: clear .grad before each backward"

# Task 4: a test of task 2 -------------------------------------------------------------------------


def average_of(average_gradients: Callable[..., Any], gradients: Any, group: Any) -> list[Any]:
    """Call a solution of task 2 with one rank's gradients; return what it leaves in ``.grad``."""
    shapes = [torch.empty(0) if gradient is None else gradient for gradient in gradients]
    params = [nn.Parameter(torch.zeros_like(shape)) for shape in shapes]
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = None if gradient is None else gradient.clone()
    average_gradients(params, group)
    return [None if param.grad is None else param.grad.detach() for param in params]


def expect_gradients(inputs: Sequence[Any]) -> None:
    """Refuse what is not a list of gradients of the same shapes on every rank."""
    forms = []
    for rank, gradients in enumerate(inputs):
        if not isinstance(gradients, list | tuple):
            raise ValueError(f"the input of rank {rank} must be a list of gradients")
        for gradient in gradients:
            floating = isinstance(gradient, Tensor) and gradient.is_floating_point()
            if gradient is not None and not floating:
                raise ValueError(
                    f"a gradient of rank {rank} is not a floating-point tensor or None"
                )
        forms.append([None if g is None else (g.shape, g.dtype) for g in gradients])
    if any(form != forms[0] for form in forms):
        raise ValueError(
            "the gradients must have the same shapes and dtypes on every rank, and a frozen "
            "parameter has None on every rank"
        )


def sums(params, group=None):  # type: ignore[no-untyped-def]
    for param in params:
        if param.grad is not None:
            total = param.grad.clone()
            dist.all_reduce(total, group=group)
            param.grad = total / dist.get_world_size(group)


def gathers(params, group=None):  # type: ignore[no-untyped-def]
    for param in params:
        if param.grad is not None:
            own_gradient = param.grad
            every = [torch.empty_like(own_gradient) for _ in range(dist.get_world_size(group))]
            dist.all_gather(every, own_gradient, group=group)
            param.grad = torch.stack(every).mean(0).to(param.dtype)


LOOP, K = "for param in params:", "dist.get_world_size(group)"
MEAN, SET = f"total / {K}", "param.grad = "
WRONG: dict[str, dict[str, list[tuple[str, str]]]] = {
    "the mean": {
        "adds up and does not divide": [(MEAN, "total")],
        "always divides by 2": [(K, "2")],
        "always divides by 3": [(K, "3")],
        "divides twice": [(MEAN, f"{MEAN} ** 2")],
    },
    "every rank": {
        "changes nothing": [(SET, "total = ")],
        "gives the mean to one rank only": [("all_reduce(total", "reduce(total, group_dst=0")],
        "gives the mean to all ranks but rank 1": [
            (SET, f"if dist.get_rank(group) != 1: {SET}"),
        ],
        "gives all ranks the gradients of one of them": [
            ("all_reduce(total", "broadcast(total, group_src=0"),
            (MEAN, "total"),
        ],
    },
    "every gradient": {
        "averages only the first gradient": [("in params:", "in params[:1]:")],
        "leaves gradients alone that are all zero": [(SET, f"if param.grad.any(): {SET}")],
        "cuts off large gradients": [(MEAN, f"({MEAN}).clamp(-10, 10)")],
        "turns each gradient around": [
            (MEAN, f"({MEAN}).flatten().flip(0).view_as(total)"),
        ],
        "gives frozen parameters a gradient": [
            (LOOP, f"{LOOP}\n    if param.grad is None: param.grad = torch.zeros_like(param)"),
        ],
        "raises an exception where a parameter is frozen": [("if param.grad is not None", "if 1")],
        "confuses gradients of the same shape": [
            (LOOP, f"means = {{}}\n{LOOP}"),
            (MEAN, f"means.setdefault(param.shape, {MEAN}).clone()"),
        ],
    },
    "every call": {
        "keeps something from the call before": [
            ("group=None):", "group=None, state={}):"),
            (LOOP, "for i, param in enumerate(params):"),
            (SET, f"{SET}state[i, param.shape] = state.get((i, param.shape), 0) + "),
        ],
        "works only in its first call": [
            ("group=None):", "group=None, calls=[]):"),
            (LOOP, f"calls.append(True)\n{LOOP}"),
            (SET, f"if len(calls) == 1: {SET}"),
        ],
    },
}
"""Part of the points → what a wrong solution does → the edits of `sums` that make it."""
# Every part has a right solution, or a test that refuses everything would get it.
CANDIDATES = [
    Candidate(gathers, "gathers all gradients, then averages", "the mean", right=True),
    Candidate(
        *(gathers, "averages in float64", "every gradient"),
        right=True,
        edits=(("= param.grad", "= param.grad.double()"),),
    ),
    Candidate(sums, "makes new tensors", "every call", right=True),
    Candidate(
        sums, "multiplies by 1/K", "every rank", right=True, edits=((MEAN, f"total * (1 / {K})"),)
    ),
    *(
        Candidate(sums, kind, part, edits=tuple(edits))
        for part, wrong in WRONG.items()
        for kind, edits in wrong.items()
    ),
]

# The checks -----------------------------------------------------------------------------------

CHECKS = {
    "shard_bounds": by_reference(
        "shard_bounds",
        seeds=(0, 3, 4, 6, 7),
        reference="course_lib.sharding:shard_bounds",
        program=run_bounds,
        draw=draw_bounds,
        variety=Variety(ranks=(1,), dtypes=("float32",), layouts=(), groups=False, calls=False),
        mistakes=BOUNDS_MISTAKES,
    ),
    "average_gradients": by_reference(
        "average_gradients",
        seeds=(1, 2, 3, 8, 9, 11, 28, 39, 40, 44),
        reference="course_lib.gradient_sync:sync_per_parameter",
        program=run_average,
        draw=draw_gradients,
        mistakes=MEAN_MISTAKES,
        may_change=["gradients"],
        same_bits=True,
        allowed=Allowed(
            slack=bytes_as_float64, hint="Sum every gradient only once, by one call of all_reduce."
        ),
        worth={"values": 2, "communication": 1},
    ),
    "data_parallel_step": by_reference(
        "data_parallel_step",
        seeds=(2, 3, 8, 12, 14, 28, 31, 34, 44, 46, 49),
        reference="course_lib.gradient_sync:data_parallel_step",
        program=run_steps,
        draw=draw_step,
        mistakes={
            OLDER: with_older_gradient(lambda k: 1),
            f"{OLDER} ": with_older_gradient(lambda k: k),
        },
        as_if={"the result if a shard of few rows counts as much as a shard of many": as_many_rows},
        allowed=Allowed(kinds=COLLECTIVES, calls=None, slack=2 * EXTRA),
        expects=[
            sends_at_most(2 * EXTRA, besides=["all_reduce"], hint="Use all_reduce for gradients.")
        ],
        worth={"values": 3, "communication": 1},
    ),
    "is_right": testing_task(
        "is_right",
        call=average_of,
        expect=expect_gradients,
        candidates=CANDIDATES,
        worth={"the mean": 1, "every rank": 1, "every gradient": 1, "every call": 1},
    ),
}
