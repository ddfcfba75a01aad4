"""The checks of this assignment. They are handed out: read them if a message is not enough.

The programs and judges of gradients are in `course_lib.checking.shared`, in `averaging` and
`training`. A program gets only its rank's input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checking import (
    Case,
    Form,
    Given,
    Wrong,
    calls_at_most,
    in_many_forms,
    only_calls,
    receives_at_least,
    same_on_all_ranks,
    sends_at_most,
    task,
)
from course_lib.checking.answers import WHOLE, Kind, sees
from course_lib.checking.shared.averaging import (
    equals_mean,
    flat_bytes,
    gradient_bytes,
    gradient_count,
    gradient_inputs,
    gradient_program,
    unless_alone,
)
from course_lib.checking.shared.training import (
    NUMEL,
    SHAPES,
    equals_sgd,
    looking_at,
    step_inputs,
    step_program,
)
from course_lib.checking.testing import Candidate, testing_task

# Task 1: each rank holds some of the elements. The judge looks for mistakes and does not compute
# the right answer, because students can read it.

Bounds = tuple[int, int]


def bounds_program(shard_bounds: Callable[..., Any], mine: Any, given: Given) -> Any:
    """Compute the bounds of every rank, for each pair (length, world size) of ``questions``.

    One rank runs this, because nothing is communicated. It begins with the last rank, so that a
    function cannot reuse a result of the rank before.
    """

    def bounds(length: int, k: int, rank: int) -> Any:
        found = shard_bounds(length, k, rank)
        if isinstance(found, slice | range):
            asked = _asked(length, k).format(rank)
            raise TypeError(f"{asked} is {found}, expected two ints (start, stop)")
        return found.tolist() if isinstance(found, np.ndarray) else found

    return {
        _asked(length, k): [bounds(length, k, rank) for rank in reversed(range(k))][::-1]
        for length, k in mine["questions"]
    }


def _asked(length: int, k: int) -> str:
    return f"shard_bounds({length}, {k}, {{}})"


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and all(map(WHOLE.test, value))


_BOUNDS = Kind("two ints (start, stop)", _is_pair, "pairs of ints")


@sees(lambda case, inputs, rank: {_asked(n, k): [_BOUNDS] * k for n, k in inputs[0]["questions"]})
def balanced_shards(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
    """Judge bounds (start, stop): all elements once, in order, sizes differing by at most one."""
    for length, k in inputs[0]["questions"]:
        _judge(f"shard_bounds({length}, {k}, rank)", length, k, values[0][_asked(length, k)])


def _judge(asked: str, length: int, k: int, answer: Sequence[Any]) -> None:
    at = 0
    for rank, (start, stop) in enumerate(answer):
        if start == stop:
            continue  # an empty shard may be anywhere
        if start != at:
            other = f"but rank {rank - 1} stopped at {at}" if rank else "expected 0"
            what = "is skipped" if start > at else "is held twice"
            raise Wrong(
                f"{asked}: rank {rank} starts at {start}, {other}",
                _if_inclusive(answer, length) or f"Element {min(start, at)} {what}.",
            )
        if stop < start:
            raise Wrong(f"{asked}: rank {rank} stops at {stop}, before its start {start}")
        at = stop
    if at > length:
        raise Wrong(f"{asked}: the last rank stops at {at}, beyond the end")
    if at < length:
        lost = f"{asked}: {length - at} of {length} elements belong to nobody"
        hint = _if_inclusive(answer, length) or "What does the integer division leave over?"
        raise Wrong(lost, hint)
    sizes = [stop - start for start, stop in answer]
    if max(sizes) - min(sizes) > 1 or sizes != sorted(sizes, reverse=True):
        raise Wrong(
            f"{asked}: the shards have sizes {sizes}",
            "Sizes may differ by one at most, and the first ranks take the extra elements.",
        )


def _if_inclusive(answer: Sequence[Bounds], length: int) -> str:
    """Return a hint if every stop is the last element and not the one after it."""
    stops = [0, *(stop + 1 for _, stop in answer)]
    if [start for start, _ in answer] == stops[:-1] and stops[-1] == length:
        return "A stop is not part of its shard: [start, stop), as in x[start:stop]."
    return ""


# Task 4: a test of task 2. You can read these solutions. The grader has others, with all_reduce.


def average_of(average_gradients: Callable[..., Any], mine: Any, group: Any) -> list[Any]:
    """Call a solution of task 2 with one rank's gradients; return what it leaves in ``.grad``."""
    shapes = [torch.empty(0) if each is None else each for each in mine]
    params = [torch.nn.Parameter(torch.zeros_like(each)) for each in shapes]
    for param, gradient in zip(params, mine, strict=True):
        param.grad = None if gradient is None else gradient.clone()
    average_gradients(params, group)
    return [None if param.grad is None else param.grad.detach() for param in params]


def expect_gradients(inputs: Sequence[Any]) -> None:
    """Refuse what is not a list of gradients of the same shapes on every rank."""
    forms = []
    for rank, gradients in enumerate(inputs):
        if not isinstance(gradients, list | tuple):
            raise ValueError(f"the input of rank {rank} must be a list of gradients")
        for each in gradients:
            if each is not None and not (isinstance(each, Tensor) and each.is_floating_point()):
                raise ValueError(
                    f"a gradient of rank {rank} is not a floating-point tensor or None"
                )
        forms.append([None if each is None else (each.shape, each.dtype) for each in gradients])
    if any(form != forms[0] for form in forms):
        raise ValueError(
            "the gradients must have the same shapes and dtypes on every rank, and a frozen "
            "parameter has None on every rank"
        )


def gathers(params, group=None):  # type: ignore[no-untyped-def]
    for param in params:
        if param.grad is not None:
            own = param.grad
            every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
            dist.all_gather(every, own, group=group)
            param.grad = torch.stack(every).mean(0).to(param.dtype)


def _gathers(kind: str, part: str, old: str, new: str, right: bool = False) -> Candidate:
    return Candidate(gathers, kind, part, right=right, edits=((old, new),))


CANDIDATES = [
    Candidate(gathers, "gathers all gradients, then averages", "the mean", right=True),
    _gathers(
        "averages in float64", "every gradient", "= param.grad", "= param.grad.double()", True
    ),
    _gathers("adds up and does not divide", "the mean", ".mean(0)", ".sum(0)"),
    _gathers("averages only the first gradient", "every gradient", "in params", "in params[:1]"),
]

# The checks -----------------------------------------------------------------------------------

QUESTIONS = {
    "lengths that divide": [(12, 1), (12, 2), (12, 3), (12, 4)],
    "lengths that do not divide": [(10, 3), (10, 4), (7, 2)],
    "fewer elements than ranks": [(2, 4), (0, 3), (1, 1)],
}

ONE_ALONE = Form(((0, 2), (1,)), "float64")
THREE = {"shapes": [(3, 2), (5,), ()]}
EXTRA = 512  # bytes that a rank may send in a step for counts and losses

CHECKS = {
    "shard_bounds": task(
        "shard_bounds",
        inputs=lambda case, generator: [dict(case.parameters)],
        program=bounds_program,
        judges=[balanced_shards],
        cases=[Case(name, 1, {"questions": asked}) for name, asked in QUESTIONS.items()],
    ),
    "average_gradients": task(
        "average_gradients",
        inputs=gradient_inputs,
        program=gradient_program,
        may_change=["gradients"],
        judges=[equals_mean("gradients", "gradient of parameter {}"), same_on_all_ranks],
        expects=[
            only_calls("all_reduce"),
            sends_at_most(flat_bytes, hint="Sum every gradient only once."),
            receives_at_least(unless_alone(gradient_bytes)),
            calls_at_most("One call of all_reduce sums a whole tensor.", all_reduce=gradient_count),
        ],
        worth={"values": 2, "communication": 1},
        cases=in_many_forms(
            Case("1 rank", 1, THREE),
            Case("2 ranks", 2, THREE),
            Case("3 ranks", 3, THREE),
            Case("4 ranks, in two groups", 4, THREE),
            Case("2 ranks, a frozen parameter", 2, {**THREE, "frozen": [1]}),
            Case("3 ranks, one alone", 3, {"shapes": [(4,), (2, 3)]}, ONE_ALONE),
            Case(
                "3 ranks, only zeros on rank 1, an inf on rank 0",
                *(3, {"shapes": [(3, 2), (4,)], "zero": 1, "overflown": 0}),
                Form(iterable="tuple"),
            ),
            Case(
                "2 ranks, large gradients, two dtypes, an empty one last",
                *(2, {"shapes": [(3,), (2, 2), (0,)], "doubles": [1], "large": 300}),
                Form(layout="transposed"),
            ),
        ),
        in_turn=[(1, 1), (2, 5)],
    ),
    "data_parallel_step": task(
        "data_parallel_step",
        inputs=step_inputs,
        program=step_program,
        judges=[
            equals_sgd("parameter", "buffer", tolerance={"float64": 1e-9}),
            equals_sgd("loss", tolerance={"float64": 1e-6}),
            looking_at(["parameter", "loss"], same_on_all_ranks),
        ],
        expects=[
            sends_at_most(lambda case, rank: 2 * (NUMEL * case.itemsize + EXTRA)),
            sends_at_most(2 * EXTRA, besides=["all_reduce"], hint="Use all_reduce for gradients."),
            calls_at_most(all_reduce=2 * (len(SHAPES) + 2)),
            receives_at_least(unless_alone(lambda case, rank: 2 * NUMEL * case.itemsize)),
        ],
        worth={"values": 3, "communication": 1},
        cases=in_many_forms(
            Case("1 rank, 6 rows", 1, {"rows": [6]}),
            Case(
                "2 ranks, 4 rows each, squared error",
                *(2, {"rows": [4, 4], "lr": 0.1, "loss": "mse_loss"}),
            ),
            Case("3 ranks, 4, 3 and 3 rows", 3, {"rows": [4, 3, 3], "lr": 0.6}),
            Case("4 ranks, 1, 6, 2 and 9 rows, in two groups", 4, {"rows": [1, 6, 2, 9]}),
            Case("3 ranks, smooth error", 3, {"rows": [2, 5, 3], "loss": "smooth_l1_loss"}),
            Case(
                "3 ranks, one alone",
                3,
                {"rows": [3, 2, 4], "lr": 0.3, "loss": "nll_loss"},
                ONE_ALONE,
            ),
            Case(
                "2 ranks, .grad is not empty",
                *(2, {"rows": [4, 3], "lr": 0.2, "loss": "mse_loss", "filled": True}),
                Form(layout="transposed", training=False),
            ),
            Case(
                "3 ranks, large errors, rank 0 has rows of zeros",
                *(3, {"rows": [2, 3, 1], "lr": 1e-4, "loss": "mse_loss", "large": 3000, "zero": 0}),
                Form(),
            ),
            Case("2 ranks, with BatchNorm", 2, {"rows": [4, 3], "lr": 0.2, "norm": True}, Form()),
        ),
        in_turn=[(2, 5)],
    ),
    "is_right": testing_task(
        "is_right",
        call=average_of,
        expect=expect_gradients,
        candidates=CANDIDATES,
        worth={"the mean": 1, "every rank": 1, "every gradient": 1, "every call": 1},
    ),
}
