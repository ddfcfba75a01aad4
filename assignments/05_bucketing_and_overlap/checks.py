"""The checks of this assignment. They are handed out: read them if a message is not enough.

The gradients come from a chain of layers whose backward takes time on the virtual clock, see
`judges.py`. The judges of buckets are in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from course_lib.checking import (
    Case,
    Form,
    Given,
    Wrong,
    calls_at_most,
    in_many_forms,
    only_calls,
    overlaps,
    same_on_all_ranks,
    sends_at_most,
    task,
    time_within,
)
from course_lib.checking.answers import WHOLE, Kind, ListOf, sees
from course_lib.checking.defence import defence, drawn_network, one_of
from course_lib.ranks.explain.words import format_table

from .judges import (
    AS_COMPUTED,
    chain_inputs,
    equals_chain,
    gradient_bytes,
    hooks_computes,
    hooks_program,
    launches,
    one_order,
    overlapped_time,
    parallel_computes,
    parallel_program,
    send_computes,
    send_program,
    where,
)

# The buckets: gradients that travel together ------------------------------------------------------

# Each case has its buckets, because students could read a judge that computes them.


def assign_program(assign_buckets: Callable[..., Any], mine: Any, given: Given) -> Any:
    """Call ``assign_buckets(params, cap, first_cap)`` for parameters as `cut` describes them.

    The function is called twice, and the first call must not affect the second.
    """
    made: dict[str, nn.Parameter] = {}  # the same name is the same tensor
    for name, elements, dtype, trainable in mine["tensors"]:
        # Each tensor is a part of a larger one, so the size of its memory is not its own size.
        memory = torch.zeros(elements + 3, dtype=getattr(torch, dtype), device=given.device)
        made.setdefault(name, nn.Parameter(memory[:elements], requires_grad=trainable))
    gradients = mine.get("gradients", False)
    for param in made.values() if gradients else ():
        param.grad = torch.ones_like(param)
    params = [made[name] for name, *_ in mine["tensors"]]
    given.model(nn.ParameterList(made.values()))
    answers = [
        assign_buckets(given.iterable(params), mine["cap"], mine["first_cap"]) for _ in range(2)
    ]
    if any((p.grad is not None) != gradients for p in made.values()):
        raise RuntimeError("assign_buckets changes .grad, but must only return positions")
    if answers[1] != answers[0]:
        raise RuntimeError(
            f"assign_buckets gives {answers[0]} in one call, and {answers[1]} in the next call "
            "with the same parameters: it keeps something from one call to the next"
        )
    return answers[0]


_BUCKETS = ListOf(ListOf(Kind("an index", WHOLE.test, "indices"), most=100), most=100)


@sees(_BUCKETS)
def right_buckets(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
    """Judge the buckets. If they are wrong, show the parameters."""
    buckets, expected = [list(bucket) for bucket in values[0]], case.parameters["expected"]
    if buckets != expected:
        raise Wrong(f"the buckets are {buckets}, expected {expected}", "", table(case.parameters))


def table(asked: Mapping[str, Any]) -> str:
    """Return the arguments of a call, as text."""
    rows, names = [("position", "bytes", "dtype", "")], [tensor[0] for tensor in asked["tensors"]]
    for i, (name, elements, dtype, trainable) in enumerate(asked["tensors"]):
        first = names.index(name)
        special = "" if trainable else "frozen"
        special = f"the same tensor as {first}" if first < i else special
        size = elements * getattr(torch, dtype).itemsize
        rows.append((str(i), str(size), dtype, special))
    return f"{format_table(rows)}\ncap = {asked['cap']} B, first_cap = {asked['first_cap']} B"


def cut(
    name: str,
    caps: tuple[int, int],
    sizes: Sequence[int],
    expected: Sequence[Sequence[int]],
    *,
    dtypes: Sequence[str] = (),
    frozen: Sequence[int] = (),
    same: Sequence[tuple[int, int]] = (),
    gradients: bool = False,
) -> Case:
    """Return a case of `assign_buckets`.

    Args:
        name: the case's name.
        caps: bytes of every bucket except the first, and of the first.
        sizes: numbers of elements of the parameters.
        expected: the only right buckets.
        dtypes: dtypes of the first parameters; the others are float32.
        frozen: positions of parameters that need no gradient.
        same: pairs of positions (i, j), i < j, that have the same tensor.
        gradients: whether there are gradients already, which must not change the result.

    """
    names = {j: i for i, j in same}
    kinds = [*dtypes, *["float32"] * (len(sizes) - len(dtypes))]
    tensors = [(f"w{names.get(i, i)}", n, kinds[i], i not in frozen) for i, n in enumerate(sizes)]
    call = {"cap": caps[0], "first_cap": caps[1], "tensors": tensors, "gradients": gradients}
    return Case(name, 1, {**call, "expected": expected})


def waiting(*shapes, **options):
    """Return the parameters of a case of task 2, in which all gradients exist already."""
    return {"shapes": shapes, "steps": [[()]], "before": True, **options}


EARLY = "Launch a bucket in the hook that completes it, with async_op=True; wait in finish."
IN_TIME = "Launch each bucket as soon as it is complete, go on, and wait only in finish."
ONCE = (
    "Send each bucket only once per step, with a tied parameter in it only once. Send nothing in "
    "no_sync."
)


def chain(layers, buckets, *steps, **options):
    """Return a case's parameters; layer i has 2 x (i + 1) elements, unless ``shapes`` is given."""
    shapes = [(i + 1, 2) for i in range(layers)]
    return {"shapes": shapes, "buckets": buckets, "steps": steps, "before": False, **options}


TWELVE = list(range(12))
BY_THREE = [[11], [10, 9, 8], [7, 6, 5, 4], [3, 2, 1, 0]]
LATE = [[11], [10], [9], TWELVE[8:0:-1], [0]], [0, 11, *TWELVE[1:11]]  # 11 is second to last
LONG = {"shapes": [(64,)] * 12, "timed": True, "seconds": 100e-6}
WIDE = list(range(24))
WIDE_BUCKETS = [[23, 22], WIDE[21:13:-1], WIDE[13:5:-1], WIDE[5::-1]]
DEEP = {"shapes": [(64,)] * 24, "timed": True, "seconds": 50e-6, "cap": 8 * 64, "first_cap": 128}
PAIRS, FOUR = [[3, 2], [1, 0]], [0, 1, 2, 3]
ALONE = Form(((0, 2), (1,)), "float64", iterable="generator")
TWO_MODELS = {"models": [[2, 3], [0, 1]], "shapes": [(1, 2), (3, 2), (2, 2), (2, 2)]}
UNLIKE = [[3], [2, 1], [0]]
UNUSUAL = {"large": 300, "zero": [1], "overflown": [0], "replaced": True}
LAST_EMPTY = {"shapes": [(2, 1), (2, 2), (3, 2), (0,)]}
BY_FOUR = [[11], [10, 9, 8, 7], [6, 5, 4, 3], [2, 1, 0]]
BESIDE = [[11], [10, 9, 8, 7], [6, 5, 4, 3], [2, 1], [0]]


def drawn_chain(generator: torch.Generator) -> Case:
    """Draw a case of task 4 for one student: layers, caps and a network that take time."""
    k, layers = one_of(generator, 2, 3, 4), one_of(generator, 7, 8, 9)
    micros = one_of(generator, 20, 30, 40, 50)
    sizes = [8 * one_of(generator, *range(2, 20)) for _ in range(layers)]
    cap, first_cap = one_of(generator, 120, 160, 200), one_of(generator, 40, 80, 120)
    unused = one_of(generator, 2, 3, 4)
    network, words = drawn_network(generator)
    bytes_each = ", ".join(str(4 * size) for size in sizes)
    name = (
        f"{k} ranks, one backward. The gradients of layers 0 to {layers - 1} have {bytes_each} B.\n"
        f"Layer {unused} is not used; backward takes {micros} µs per other layer. The cap is "
        f"{4 * cap} B, the first cap {4 * first_cap} B.\n{words}; an all_reduce is a ring."
    )
    steps = [[[i for i in range(layers) if i != unused]]]
    parameters = {"shapes": [(size,) for size in sizes], "steps": steps, "seconds": 1e-6 * micros}
    return Case(name, k, {**parameters, "cap": cap, "first_cap": first_cap}, network=network)


CHECKS = {
    "assign_buckets": task(
        "assign_buckets",
        inputs=lambda case, generator: [
            {key: value for key, value in case.parameters.items() if key != "expected"}
        ],
        program=assign_program,
        judges=[right_buckets],
        cases=in_many_forms(
            cut("six of one size", (32, 16), [4] * 6, [[5], [4, 3], [2, 1], [0]]),
            cut("other sizes", (40, 8), [3, 5, 1, 9, 2, 1], [[5], [4], [3, 2], [1, 0]]),
            cut("one larger than the cap", (24, 12), [1, 30, 1, 1], [[3, 2], [1], [0]]),
            cut(
                "the last is larger than the cap",
                *((24, 8), [3, 3, 3, 30], [[3], [2, 1], [0]]),
                gradients=True,
            ),
            cut("two are frozen", (24, 24), [2, 3, 2, 3], [[2, 0]], frozen=(1, 3)),
            cut("the last is the first", (24, 8), [2, 3, 2], [[1], [0]], same=[(0, 2)]),
            cut("the first is there twice", (20, 20), [1, 2, 1, 2], [[3, 1, 0]], same=[(0, 2)]),
            cut(
                "two dtypes",
                *((16, 8), [2, 2, 1, 1, 1, 1], [[5], [3], [4, 2], [1], [0]]),
                dtypes=["float32", "float64"] * 3,
            ),
            cut(
                "one dtype between another",
                *((64, 64), [1] * 6, [[4, 3], [5, 2, 1, 0]]),
                dtypes=["float32"] * 3 + ["float64"] * 2,
            ),
            cut(
                "two bytes each",
                *((11, 4), [1, 2, 1, 3, 1, 1], [[5, 4], [3, 2], [1, 0]]),
                dtypes=["bfloat16"] * 6,
            ),
            cut("two are empty", (16, 16), [0, 2, 0, 2], [[3, 2, 1, 0]]),
            cut("the last is empty", (8, 8), [2, 2, 0], [[2, 1], [0]]),
            cut("first_cap above cap", (8, 64), [1] * 4, [[3, 2], [1, 0]]),
        ),
        in_turn=[(1, 0)],
    ),
    "send_bucket": task(
        "send_bucket",
        inputs=chain_inputs,
        program=send_program,
        computes=send_computes,
        may_change=["before"],
        judges=[equals_chain("gradient of parameter {}"), same_on_all_ranks],
        expects=[
            only_calls("all_reduce"),
            calls_at_most(
                "Send each bucket as one tensor.",
                all_reduce=lambda case, rank: len(case.parameters.get("models", [0])),
            ),
            sends_at_most(gradient_bytes, hint="Sum every gradient only once."),
            where(
                "timed",
                "send_bucket starts the sum; finish waits for it.",
                overlaps("all_reduce", 1),
            ),
        ],
        worth={"values": 2, "communication": 1},
        cases=in_many_forms(
            Case("1 rank", 1, waiting((3, 2), (5,))),
            Case("2 ranks", 2, waiting((3, 2), (5,), timed=True)),
            Case("3 ranks", 3, waiting((2, 3), (4,), (), timed=True)),
            Case("4 ranks, in two groups", 4, waiting((4, 2), (3,))),
            Case("2 ranks, one without a gradient", 2, waiting((3, 2), (5,), missing=[1])),
            Case("3 ranks, one without gradients", 3, waiting((2,), (3, 2), missing=[0, 1]), ALONE),
            Case(
                "2 ranks, two at once",
                2,
                waiting((2, 1), (4,), (2,), models=[[0, 2], [1]], seconds=0),
            ),
            Case(
                "3 ranks, large, zeros and an inf on rank 0, the last is empty",
                *(3, waiting((3, 2), (2,), (4,), (0,), **UNUSUAL)),
            ),
        ),
        in_turn=[(2, 5), (1, 1)],
    ),
    "hook_buckets": task(
        "hook_buckets",
        inputs=chain_inputs,
        program=hooks_program,
        computes=hooks_computes,
        judges=[equals_chain(), same_on_all_ranks],
        expects=[
            only_calls("all_reduce"),
            calls_at_most(ONCE, all_reduce=launches),
            one_order,
            AS_COMPUTED,
            where("timed", EARLY, overlaps("all_reduce", 0.7)),
            where("timed", IN_TIME, time_within(overlapped_time)),
        ],
        worth={"values": 3, "communication": 2},
        cases=in_many_forms(
            Case("1 rank, two steps", 1, chain(3, [[2], [1, 0]], [[0, 1, 2]], [[0, 1, 2]])),
            Case("2 ranks, two steps", 2, chain(4, PAIRS, [FOUR], [FOUR])),
            Case(
                "3 ranks, each its own order",
                3,
                chain(4, UNLIKE, [[(0, 1, 2, 3), (3, 2, 1, 0), (2, 1, 3, 0)]]),
            ),
            Case(
                "4 ranks, in two groups, .grad is not empty",
                4,
                chain(3, [[2, 1], [0]], [[0, 1, 2]], before=True),
            ),
            Case(
                "2 ranks, rank 1 leaves one out",
                2,
                chain(
                    4,
                    PAIRS,
                    [[(0, 1, 2, 3), (0, 1, 3)]],
                    [[(0, 2, 3), (0, 1, 2, 3)]],
                    in_place=True,
                ),
            ),
            Case(
                "2 ranks, rank 1 leaves one out, .grad is not empty",
                2,
                chain(4, PAIRS, [[(0, 1, 2, 3), (0, 1, 3)]], before=True),
            ),
            Case(
                "3 ranks, nobody uses one, then one rank a bucket",
                3,
                chain(4, PAIRS, [FOUR], [[0, 1, 3]], [[(0, 1), (0, 1, 2, 3), (0, 1)]]),
            ),
            Case("2 ranks, two models at once", 2, chain(4, PAIRS, [FOUR], [FOUR], **TWO_MODELS)),
            Case(
                "3 ranks, in two groups, a tied layer", 3, chain(3, [[2, 1], [0]], [[0, 1, 2, 0]])
            ),
            Case(
                "4 ranks, 12 layers that take time",
                4,
                chain(12, BY_THREE, [TWELVE], [TWELVE], [TWELVE], **LONG),
            ),
            Case(
                "2 ranks, several leave at once",
                2,
                chain(12, LATE[0], [LATE[1]], [LATE[1]], **{**LONG, "seconds": 200e-6}),
            ),
            Case(
                "2 ranks, large, zeros and an inf on rank 0, .grad is replaced, the last is empty",
                *(2, chain(4, PAIRS, [FOUR], [FOUR], **UNUSUAL, **LAST_EMPTY)),
                Form(),
            ),
        ),
        in_turn=[(2, 8)],
    ),
    "data_parallel": task(
        "data_parallel",
        inputs=chain_inputs,
        program=parallel_program,
        computes=parallel_computes,
        judges=[equals_chain(), same_on_all_ranks],
        expects=[
            only_calls("all_reduce"),
            calls_at_most(ONCE, all_reduce=launches),
            one_order,
            AS_COMPUTED,
            where("timed", EARLY, overlaps("all_reduce", 0.6)),
            where("timed", IN_TIME, time_within(overlapped_time)),
        ],
        worth={"values": 3, "communication": 2},
        cases=in_many_forms(
            Case(
                "1 rank, two steps",
                1,
                chain(3, [[2], [1, 0]], [[0, 1, 2]], [[0, 1, 2]], cap=6, first_cap=6),
            ),
            Case(
                "2 ranks, one larger than the cap",
                2,
                chain(4, [[3], [2], [1], [0]], [FOUR], cap=5, first_cap=5, before=True),
            ),
            Case(
                "3 ranks, no_sync for two of three",
                3,
                chain(
                    *(4, UNLIKE, [FOUR] * 3),
                    **{"cap": 10, "first_cap": 2, "in_place": True, "interrupted": True},
                ),
            ),
            Case(
                "4 ranks, in two groups, two steps with no_sync",
                4,
                chain(4, UNLIKE, [FOUR] * 2, [FOUR, [0, 1, 3]], cap=10, first_cap=2, before=True),
            ),
            Case(
                "3 ranks, frozen, unused and tied",
                3,
                chain(
                    4,
                    [[3], [2], [0]],
                    [[0, 1, 2, 0], [0, 1, 3]],
                    frozen=[1],
                    again=[0],
                    cap=7,
                    first_cap=7,
                ),
            ),
            Case(
                "3 ranks, in two groups, two dtypes",
                3,
                chain(4, [[3], [1], [2, 0]], [[0, 1, 2, 3]], doubles=[1, 3], cap=8, first_cap=8),
                Form(((0, 2), (1,)), "bfloat16", "transposed", "generator"),
            ),
            Case(
                "4 ranks, 24 layers that take time",
                4,
                chain(24, WIDE_BUCKETS, [WIDE], [WIDE], **DEEP),
            ),
            Case(
                "3 ranks, in two groups, some are left out",
                3,
                chain(
                    4,
                    UNLIKE,
                    [[(0, 1, 2), (0, 1)]],
                    [[(0, 2), (0, 1), (1,)]],
                    cap=10,
                    first_cap=2,
                ),
            ),
            Case(
                "2 ranks, two dtypes, small first buckets",
                2,
                chain(
                    6,
                    [[5], [4, 3, 2], [1], [0]],
                    [[0, 1, 2, 3, 4, 5]],
                    doubles=[0, 1],
                    cap=24,
                    first_cap=4,
                ),
                Form(dtype="bfloat16", iterable="tuple"),
            ),
            Case(
                "2 ranks, two models at once",
                2,
                chain(4, PAIRS, *[[FOUR] * 2] * 2, cap=14, first_cap=14, **TWO_MODELS),
            ),
            Case(
                "3 ranks, 12 layers that take time, another model in no_sync",
                3,
                chain(
                    *(12, BESIDE, [TWELVE]),
                    **{**LONG, "cap": 4 * 64, "first_cap": 64, "models": [[0], TWELVE[1:]]},
                    quiet=[0],
                ),
            ),
            Case(
                "4 ranks, 12 layers that take time, no_sync",
                4,
                chain(
                    12,
                    BY_FOUR,
                    [TWELVE] * 2,
                    [TWELVE],
                    **LONG,
                    cap=4 * 64,
                    first_cap=64,
                    interrupted=True,
                ),
            ),
            Case(
                "3 ranks, large, zeros and an inf on rank 0, .grad is replaced, the last is empty",
                3,
                chain(
                    *(4, [[3, 2], [1, 0]], [FOUR, FOUR], [FOUR]),
                    **{**UNUSUAL, **LAST_EMPTY, "cap": 7, "first_cap": 7},
                ),
                Form(),
            ),
        ),
        in_turn=[(5, 2)],
    ),
    "defend_data_parallel": defence("data_parallel", drawn_chain),
}
