"""The checks of this assignment. They are handed out: read them if a message is not enough.

A check has a reference in `course_lib`, a program that calls a function on a rank, and a draw that
makes a case from a seed. A program gets only its rank's input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.checking import (
    Allowed,
    Case,
    Draw,
    Given,
    Variety,
    Wrong,
    by_reference,
)
from course_lib.checking.answers import WHOLE, Kind, ListOf, sees
from course_lib.checking.defence import defence, drawn_network, one_of
from course_lib.checking.on_ranks.leaves import with_tensors
from course_lib.ranks import compute
from course_lib.ranks.explain.words import format_table


class Unusual:
    """What is unusual in a case: up to three of some kinds, which are equally likely.

    Of two kinds that exclude each other, the second one gives way.
    """

    def __init__(
        self, d: Draw, kinds: Sequence[str], apart: Sequence[tuple[str, str]] = ()
    ) -> None:
        chosen = list(dict.fromkeys(d.one_of(*kinds) for _ in range(3)))
        lost = {second for first, second in apart if first in chosen}
        self._ranks = {
            kind: d.rank(kind, one_in=1) if "{}" in kind else d.maybe(kind, 0, -1, one_in=1)
            for kind in chosen
            if kind not in lost
        }

    def has(self, kind: str) -> bool:
        """Return whether the case has this feature."""
        return self.rank(kind) >= 0

    def rank(self, kind: str) -> int:
        """Return the rank that has this feature, or -1."""
        return self._ranks.get(kind, -1)


# Task 1: gradients that travel together -----------------------------------------------------------


def run_assign(assign_buckets: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Call ``assign_buckets(params, cap, first_cap)`` several times; return the answers."""
    params = []
    for elements, dtype, trainable in inputs["tensors"]:
        # Each tensor is a part of a larger one, so the size of its memory is not its own size.
        memory = torch.ones(elements + 3, dtype=getattr(torch, dtype), device=case.device)
        params.append(nn.Parameter(memory[:elements], requires_grad=trainable))
        params[-1].grad = torch.ones_like(params[-1]) if inputs["gradients"] else None
    gradients = [param.grad for param in params]
    case.watch.add_parameters("the parameters", params)
    answers = [
        assign_buckets(case.iterable([params[i] for i in order]), *caps)
        for order, caps in inputs["calls"]
    ]
    if any(param.grad is not gradient for param, gradient in zip(params, gradients, strict=True)):
        raise RuntimeError("assign_buckets changes .grad, but must only return positions")
    return answers


ASSIGN_KINDS = (
    *("two dtypes", "two dtypes", "two bytes each", "some are frozen", "some are there twice"),
    *("some are empty", "one larger than the cap", "one parameter", "cap 0"),
)


def draw_assign(d: Draw) -> list[Any]:
    """Draw parameters and caps. The first call comes again after two others."""
    unusual = Unusual(d, ASSIGN_KINDS, [("two dtypes", "two bytes each")])
    n = 1 if unusual.has("one parameter") else d.one_of(4, 5, 6, 7)
    mixed, half = unusual.has("two dtypes"), unusual.has("two bytes each")
    empty, large = unusual.has("some are empty"), unusual.has("one larger than the cap")
    frozen = d.one_of(2, 3, n) if unusual.has("some are frozen") else 0
    dtypes = ("float32", "float64") if mixed else ("bfloat16",) if half else ("float32",)
    sizes = [d.one_of(0, 1, 2) if empty else d.one_of(1, 1, 2, 2, 3, 5) for _ in range(n)]
    if large:
        sizes[d.one_of(*range(n))] = 30
    trainable = set(range(n)) - {d.one_of(*range(n)) for _ in range(frozen)}
    order = [*range(n)]
    for _ in range(d.one_of(1, 2) if unusual.has("some are there twice") else 0):
        order.insert(d.one_of(*range(len(order) + 1)), d.one_of(*range(n)))
    zero, unit = unusual.has("cap 0"), 2 if half else 4

    def draw_caps() -> tuple[int, int]:
        first = unit * d.one_of(1, 2, 4, 12) + d.one_of(0, 0, 1)
        return 0 if zero else unit * d.one_of(3, 4, 6, 8, 10) + d.one_of(0, 0, 1), first

    tensors = [(size, d.one_of(*dtypes), i in trainable) for i, size in enumerate(sizes)]
    caps = draw_caps()
    calls = [(order, caps), (order, draw_caps()), (order[::-1], caps), (order, caps)]
    return [{"tensors": tensors, "calls": calls, "gradients": d.one_of(False, True)}]


_BUCKETS = ListOf(ListOf(Kind("an index", WHOLE.test, "indices"), most=100), most=100)


@sees(lambda case, inputs, rank: [_BUCKETS] * len(inputs[0]["calls"]))
def right_buckets(case: Case, inputs: Any, expected: Any, values: Sequence[Any]) -> None:
    """Judge the buckets. If they are wrong, show the parameters."""
    first, *_, again = answers = [[list(bucket) for bucket in buckets] for buckets in values[0]]
    if first != again:
        raise Wrong(
            f"assign_buckets gives {first} in one call, and {again} in a later call with the same "
            "parameters and caps: it keeps something from one call to the next"
        )
    for buckets, right, call in zip(answers, expected[0], inputs[0]["calls"], strict=True):
        if buckets != right:
            alike = sorted(map(sorted, buckets)) == sorted(map(sorted, right))
            hint = (
                "Each bucket has the right positions. Inside it, they stand in the order in which "
                "the parameters were put in; the buckets stand in the order of their last members."
            )
            message = f"the buckets are {buckets}, expected {right}"
            raise Wrong(message, hint if alike else "", table(inputs[0]["tensors"], *call))


def table(tensors: Sequence[Any], order: Sequence[int], caps: tuple[int, int]) -> str:
    """Return the arguments of a call, as text."""
    rows = [("position", "bytes", "dtype", "")]
    for position, i in enumerate(order):
        elements, dtype, trainable = tensors[i]
        first = order.index(i)
        special = "" if trainable else "frozen"
        special = f"the same tensor as {first}" if first < position else special
        size = elements * getattr(torch, dtype).itemsize
        rows.append((str(position), str(size), dtype, special))
    return f"{format_table(rows)}\ncap = {caps[0]} B, first_cap = {caps[1]} B"


# Task 2: a bucket on its way ----------------------------------------------------------------------


def run_send(send_bucket: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Call ``send_bucket(params, group=group)``, compute for a while, and call the result.

    If there are two buckets, both are on their way at once.
    """
    params = parameters_of(inputs)
    case.watch.add_parameters("the parameters", params)
    finishes = []
    for bucket in inputs["buckets"]:
        finish = send_bucket(case.iterable([params[i] for i in bucket]), group=case.group)
        finishes.append(expect_function(finish, "what send_bucket returns"))
    compute(1e-3)
    for finish in finishes[::-1]:
        finish()
    return {"gradient of parameter {}": [param.grad for param in params]}


def parameters_of(inputs: Any) -> list[nn.Parameter]:
    """Return the layers' weights as parameters, with their gradients from before the first step."""
    params = []
    for i, (weight, before) in enumerate(zip(inputs["weights"], inputs["before"], strict=True)):
        weight = weight.double() if i in inputs.get("doubles", ()) else weight
        params.append(nn.Parameter(weight, requires_grad=i not in inputs.get("frozen", ())))
        params[-1].grad = None if before is None else before.to(weight.dtype, copy=True)
    return params


def expect_function(value: Any, name: str) -> Callable[..., Any]:
    """Return the function; raise TypeError if it is something else."""
    if not callable(value):
        raise TypeError(f"{name} is {type(value).__name__}, expected a function")
    return value


BUCKET_KINDS = (
    *("an empty parameter", "two buckets at once", "a gradient that no rank has"),
    *("rank {} lacks a gradient", "rank {} has no gradients", "only zeros on rank {}"),
    *("an inf or NaN on rank {}", "large gradients"),
)


def draw_bucket(d: Draw) -> list[Any]:
    """Draw the same weights for every rank, and different gradients; some may be missing."""
    unusual = Unusual(d, BUCKET_KINDS)
    shapes = d.one_of([(3, 2), (5,)], [(2, 3), (4,), ()], [(3, 2), (6,)])
    if unusual.has("an empty parameter"):
        shapes = [*shapes[:1], (0,), *shapes[1:]]
    places = [*range(len(shapes))]
    buckets = [places[::2], places[1::2]] if unusual.has("two buckets at once") else [places]
    nowhere = unusual.has("a gradient that no rank has")
    incomplete = unusual.rank("rank {} lacks a gradient")
    bare = unusual.rank("rank {} has no gradients")
    zeros = unusual.rank("only zeros on rank {}")
    overflow = unusual.rank("an inf or NaN on rank {}")
    size, lacking = 300 if unusual.has("large gradients") else 1, d.one_of(*places)
    weights = [d.randn(*shape) for shape in shapes]

    def gradients_of(rank: int) -> list[Tensor | None]:
        drawn = [size * (rank != zeros) * d.randn(*shape) for shape in shapes]
        drawn = [d.not_finite(gradient) for gradient in drawn] if rank == overflow else drawn
        lacks = {lacking} if nowhere or rank == incomplete else {*places} if rank == bare else ()
        return [None if i in lacks else gradient for i, gradient in enumerate(drawn)]

    return [{"weights": weights, "before": gradients_of(r), "buckets": buckets} for r in d.ranks]


def sum_of(key: str) -> Callable[..., Any]:
    """Return the mistake that gives K times the mean."""
    return lambda inputs, me, expected: {
        key: with_tensors(expected[me][key], lambda mean: len(inputs) * mean)
    }


SUM = "the sum over the ranks, not the mean"

# Task 3: buckets that leave by themselves ---------------------------------------------------------

# A layer adds (w * x).sum() to a number, so the gradient of its weight w is x. A step has micro-
# batches, and a micro-batch is a list of layers in the order of their use, each with its x.

GRADIENTS = "gradient in step {} of parameter {}"


def run_hooks(hook_buckets: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Call ``hook_buckets(buckets, group=group)``; in each step, do backward and ``finish()``.

    If there are two models, each has its own call, and both take their steps at once.
    """
    params, finishes = parameters_of(inputs), []
    for model in inputs["models"]:
        places = [bucket for bucket in inputs["buckets"] if bucket[0] in model]
        buckets = [[params[i] for i in bucket] for bucket in places]
        finish = hook_buckets(tuple(buckets) if inputs["in_tuple"] else buckets, group=case.group)
        finishes.append(expect_function(finish, "what hook_buckets returns"))
    return take_steps(params, inputs, finishes)


def take_steps(
    params: Sequence[nn.Parameter],
    inputs: Any,
    finishes: Sequence[Callable[[], object]],
    no_syncs: Sequence[Callable[[], Any]] = (),
) -> Any:
    """Do the steps; return the gradients of each, and the parameters after them.

    All micro-batches of a step except the last are inside the ``no_sync`` of every model.
    """
    gradients = []
    for step, in_place in zip(inputs["steps"], inputs["in_place"], strict=True):
        *local, last = step
        for batch in local:
            call = partial(in_nested, no_syncs, partial(backward, params, batch, inputs["seconds"]))
            inside(no_syncs, inputs["interrupted"], call)
        quiet = [no_syncs[i] for i in inputs["quiet"]]
        inside(quiet, False, partial(backward, params, last, inputs["seconds"]))
        for param in params if inputs["replaced"] else ():  # as code that unscales gradients does
            param.grad = None if param.grad is None else param.grad.clone()
        for finish in finishes[::-1]:
            finish()
        gradients.append([None if param.grad is None else param.grad.clone() for param in params])
        for param in params:  # zero_grad has two ways
            param.grad = param.grad.zero_() if in_place and param.grad is not None else None
    return {
        GRADIENTS: gradients,
        "parameter {} at the end": [param.detach().clone() for param in params],
        "parameter {} requires a gradient": [param.requires_grad for param in params],
    }


def backward(params: Sequence[Tensor], batch: Sequence[tuple[int, Tensor]], seconds: float) -> None:
    """Do forward and backward of these layers; each takes `seconds` in backward."""
    total = torch.zeros((), dtype=torch.float64, device=params[0].device, requires_grad=True)
    for i, x in batch:
        total = total + (params[i] * x.to(params[i].dtype)).sum()
        if x.numel():  # This runs before the layer's own gradient exists.
            total.register_hook(lambda _: compute(seconds))
    total.backward()


class _InterruptedError(Exception):
    """Leaves a context early."""


def inside(
    contexts: Sequence[Callable[[], Any]], interrupted: bool, call: Callable[[], object]
) -> None:
    """Make the call inside all these contexts; if `interrupted`, leave them by an exception."""
    try:
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            call()
            if interrupted:
                raise _InterruptedError
        if interrupted:
            raise RuntimeError(
                "no_sync swallows an exception. An exception inside no_sync must reach the caller"
            )
    except _InterruptedError:
        pass


def in_nested(contexts: Sequence[Callable[[], Any]], call: Callable[[], object]) -> None:
    """Make the call after each context was entered and left: the outer one must not end by that."""
    for context in contexts:
        with context():
            pass
    call()


CHAIN_KINDS = (
    *("layers that take time", "layers that take time", "two models at once"),
    *("two models at once", "a layer used twice", "layers that nobody uses"),
    *("a step without backward", "each rank its own order", "two dtypes"),
    *("rank {} leaves layers out", "rank {} leaves layers out"),
)
# Two models must launch their buckets in one order, so the ranks use the same layers there.
APART = (
    ("two models at once", "each rank its own order"),
    ("two models at once", "rank {} leaves layers out"),
)
TWISTS = ("an empty layer", "another order of layers", "a frozen layer", ".grad is replaced")
NUMBERS = ("large numbers", "only zeros on rank {}", "an inf or NaN on rank {}")


def draw_chain(d: Draw, unusual: Unusual, counts: Sequence[int]) -> list[Any]:
    """Draw a chain of layers, and steps with some number of micro-batches, one of `counts`."""
    long, two = unusual.has("layers that take time"), unusual.has("two models at once")
    tied, own_order = unusual.has("a layer used twice"), unusual.has("each rank its own order")
    nobody, idle = unusual.has("layers that nobody uses"), unusual.has("a step without backward")
    left = unusual.rank("rank {} leaves layers out")
    twist, numbers = d.one_of("", *TWISTS), d.one_of("", "", *NUMBERS)
    if len(d.features) > 1:  # so the case has a name that can be read
        twist, numbers = d.one_of((twist, ""), ("", numbers))
    special, before = d.one_of(*d.ranks), d.one_of("", ".grad is not empty")
    for feature in filter(None, (twist, numbers.format(special), before)):
        d.say(feature)
    n = d.one_of(8, 12) if long else d.one_of(3, 4, 6)
    shapes = [(d.one_of(16, 64, 200),) if long else (i + 1, 2) for i in range(n)]
    # With two models, the first one has enough layers to lose one.
    changed = d.one_of(*range(n // 2 if two else 0, n))
    if twist == "an empty layer":
        shapes[changed] = (0,)
    frozen = [changed] if twist == "a frozen layer" else []
    order = shuffled(d, range(n)) if twist == "another order of layers" else [*range(n)]
    count = d.one_of(2, 3)
    sizes = [d.one_of(*counts) for _ in range(count)]
    absent = [
        [{d.one_of(*range(n)) for _ in range(d.one_of(1, 2, n))} for _ in range(size)]
        for size in sizes
    ]

    def draw_batch(rank: int, step: int, batch: int) -> list[tuple[int, Tensor]]:
        uses = shuffled(d, order) if own_order else order
        if nobody or rank == left:
            uses = [i for i in uses if i not in absent[step][batch] or 0 in shapes[i]]
        uses = [*uses, *uses[:1]] if tied else uses
        uses = [] if idle and step == count - 1 else uses
        numbers_here = numbers if rank == special or "{}" not in numbers else ""
        size = 300 if numbers_here == NUMBERS[0] else 0 if numbers_here == NUMBERS[1] else 1
        drawn = [(i, size * d.randn(*shapes[i])) for i in uses]
        return [(i, d.not_finite(x) if numbers_here == NUMBERS[2] else x) for i, x in drawn]

    common = {
        "weights": [d.randn(*shape) for shape in shapes],
        "frozen": frozen,
        "doubles": [],
        "tied": order[:1] if tied else [],
        "models": [[*range(n // 2, n)], [*range(n // 2)]] if two else [[*range(n)]],
        "in_place": [d.one_of(True, False) for _ in range(count)],
        "replaced": twist == ".grad is replaced",
        "interrupted": False,
        "quiet": [],
        "seconds": d.one_of(100e-6, 200e-6) if long else 20e-6,
    }
    inputs = []
    for rank in d.ranks:
        steps = [[draw_batch(rank, s, b) for b in range(size)] for s, size in enumerate(sizes)]
        drawn = [d.randn(*shape) for shape in shapes]
        held = [g if before and i not in frozen else None for i, g in enumerate(drawn)]
        inputs.append({**common, "steps": steps, "before": held})
    return inputs


def shuffled(d: Draw, items: Sequence[int]) -> list[int]:
    """Return the items in another order."""
    left = [*items]
    return [left.pop(d.one_of(*range(len(left)))) for _ in items]


def draw_hooks(d: Draw) -> list[Any]:
    """Draw a chain of layers, and cut the trained ones into buckets, from the last to the first."""
    unusual = Unusual(d, CHAIN_KINDS, APART)
    inputs = draw_chain(d, unusual, [1])
    buckets = []
    for model in inputs[0]["models"]:
        trained = [i for i in reversed(model) if i not in inputs[0]["frozen"]]
        cuts = {d.one_of(*range(len(trained))) for _ in range(d.one_of(1, 3))}
        buckets += [trained[a:b] for a, b in pairwise(sorted({0, *cuts, len(trained)}))]
    doubles = d.one_of(*buckets) if unusual.has("two dtypes") else []
    changes = {"buckets": buckets, "doubles": doubles, "in_tuple": d.one_of(True, False)}
    return [{**rank_inputs, **changes} for rank_inputs in inputs]


def of_the_step_before(inputs: Sequence[Any], me: int, expected: Sequence[Any]) -> Any:
    steps = expected[me][GRADIENTS]
    return {GRADIENTS: [steps[0], *steps[:-1]]}


def as_if_steps(
    change: Callable[[list[Any]], list[Any]], with_before: bool = True
) -> Callable[..., Any]:
    """Return the mistake that takes `change(micro-batches)` for the micro-batches of each step.

    Where ranks use different layers, they send at different moments: there it explains nothing.
    """

    def changed(inputs: Sequence[Any]) -> Sequence[Any]:
        layers = [
            [[i for i, _ in batch] for step in member["steps"] for batch in step]
            for member in inputs
        ]
        alike = layers[1:] == layers[:-1]
        return [
            {
                **member,
                "steps": [change(step) for step in member["steps"]] if alike else [],
                "before": [g if with_before else None for g in member["before"]],
            }
            for member in inputs
        ]

    return changed


CHAIN_MISTAKES = {
    SUM: sum_of(GRADIENTS),
    "the result of the step before: forget at the end of a step what was sent and what was ready": (
        of_the_step_before
    ),
}
TOO_EARLY = {
    "what .grad held before the last backward: the bucket left too early. It is complete when "
    "register_post_accumulate_grad_hook has called, in this backward, for all its parameters": (
        as_if_steps(lambda step: [*step[:-1], []])
    )
}
IN_ORDER = (
    "Send each bucket once per step, in the order of the buckets, even where some are not "
    "complete. Launch it in the hook that completes it, with async_op=True, and wait in finish."
)

# Task 4: your own data parallel -------------------------------------------------------------------


def run_parallel(data_parallel: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Call ``data_parallel(params, cap, first_cap, group=group)``; accumulate and ``finish()``."""
    params, finishes, no_syncs = parameters_of(inputs), [], []
    for model in inputs["models"]:
        listed = [params[i] for i in (*model, *(i for i in inputs["tied"] if i in model))]
        functions = data_parallel(case.iterable(listed), *inputs["caps"], group=case.group)
        if not isinstance(functions, tuple) or len(functions) != 2:
            raise TypeError(
                f"data_parallel returns {type(functions).__name__}, expected (finish, no_sync)"
            )
        finishes.append(expect_function(functions[0], "finish"))
        no_syncs.append(expect_function(functions[1], "no_sync"))
    return take_steps(params, inputs, finishes, no_syncs)


def draw_parallel(d: Draw) -> list[Any]:
    """Draw a chain of layers, micro-batches and caps."""
    unusual = Unusual(d, (*CHAIN_KINDS, *2 * ("exceptions leave no_sync",)), APART)
    interrupted = unusual.has("exceptions leave no_sync")
    inputs = draw_chain(d, unusual, [2, 3] if interrupted else [1, 1, 2, 3])
    if not interrupted and max(len(step) for step in inputs[0]["steps"]) > 1:
        d.say("no_sync")
    quiet = d.one_of([0], [1], []) if inputs[0]["models"][1:] else []
    if quiet:
        d.say("one of them always in no_sync")
    places, unit = range(len(inputs[0]["weights"])), d.dtype.itemsize
    doubles = [d.one_of(*places), d.one_of(*places)] if unusual.has("two dtypes") else []
    cap, first = (128, 256, 400), (16, 64)
    if len(places) < 8:
        cap, first = (5, 7, 10, 24), (1, 2, 7, 40)
    caps = [unit * d.one_of(*cap) + d.one_of(0, 0, 1), unit * d.one_of(*first)]
    changes = {"doubles": doubles, "interrupted": interrupted, "quiet": quiet, "caps": caps}
    return [{**rank_inputs, **changes} for rank_inputs in inputs]


NO_SYNC = "A tied parameter is in one bucket, once. Send nothing in no_sync."
FIRST_OR_LAST = {
    "the mean of the first micro-batch. Send nothing inside no_sync, even after an inner no_sync "
    "of the same model has ended": as_if_steps(lambda step: step[:1]),
    "the mean of the last micro-batch: send the sums that .grad holds": (
        as_if_steps(lambda step: step[-1:], with_before=False)
    ),
}

# Task 5: questions on the student's own run -------------------------------------------------------


def drawn_chain(generator: torch.Generator) -> tuple[Case, list[Any]]:
    """Draw a case of task 4 for one student: layers, caps and a network that take time."""
    k, layers = one_of(generator, 2, 3, 4), one_of(generator, 7, 8, 9)
    micros = one_of(generator, 20, 30, 40, 50)
    sizes = [8 * one_of(generator, *range(2, 20)) for _ in range(layers)]
    cap, first_cap = one_of(generator, 120, 160, 200), one_of(generator, 40, 80, 120)
    unused = one_of(generator, 2, 3, 4)
    network, description = drawn_network(generator)
    bytes_each = ", ".join(str(4 * size) for size in sizes)
    name = (
        f"{k} ranks, one backward. The gradients of layers 0 to {layers - 1} have {bytes_each} B.\n"
        f"Layer {unused} is not used; backward takes {micros} µs per other layer. The cap is "
        f"{4 * cap} B, the first cap {4 * first_cap} B.\n{description}; an all_reduce is a ring."
    )

    def draw() -> list[Tensor]:
        return [torch.randn(size, generator=generator) for size in sizes]

    common = {"weights": draw(), "before": [None] * layers, "frozen": [], "doubles": []}
    common |= {"tied": [], "models": [[*range(layers)]], "in_place": [False], "replaced": False}
    common |= {"interrupted": False, "quiet": [], "seconds": 1e-6 * micros}
    common |= {"caps": [4 * cap, 4 * first_cap]}
    inputs = [
        {**common, "steps": [[[(i, x) for i, x in enumerate(draw()) if i != unused]]]}
        for _ in range(k)
    ]
    return Case(name, k, network=network), inputs


# The checks ---------------------------------------------------------------------------------------

CHECKS = {
    "assign_buckets": by_reference(
        "assign_buckets",
        seeds=(1, 2, 8, 10, 14, 19, 22, 30, 40, 46),
        reference="course_lib.bucketing:trained_buckets",
        program=run_assign,
        draw=draw_assign,
        variety=Variety(ranks=(1,), dtypes=("float32",), layouts=(), groups=False),
        judge=right_buckets,
    ),
    "send_bucket": by_reference(
        "send_bucket",
        seeds=(2, 3, 11, 12, 17, 20, 22, 28, 37, 44, 51),
        reference="course_lib.ddp.functions:send_bucket",
        program=run_send,
        draw=draw_bucket,
        mistakes={SUM: sum_of("gradient of parameter {}")},
        same_bits=True,
        allowed=Allowed(
            time=1.01,
            hint="Send each bucket as one tensor, only once: send_bucket starts the sum, and "
            "finish waits for it.",
        ),
        worth={"values": 2, "communication": 1},
    ),
    "hook_buckets": by_reference(
        "hook_buckets",
        seeds=(2, 3, 4, 9, 12, 28, 32, 34, 43, 51, 54, 62),
        reference="course_lib.ddp.functions:hook_buckets",
        program=run_hooks,
        draw=draw_hooks,
        mistakes=CHAIN_MISTAKES,
        as_if=TOO_EARLY,
        same_bits=True,
        allowed=Allowed(in_order=True, time=1.01, hint=IN_ORDER),
        worth={"values": 3, "communication": 2},
    ),
    "data_parallel": by_reference(
        "data_parallel",
        seeds=(0, 3, 9, 11, 12, 28, 37, 39, 43, 44, 46),
        reference="course_lib.ddp.functions:data_parallel",
        program=run_parallel,
        draw=draw_parallel,
        mistakes=CHAIN_MISTAKES,
        as_if={**FIRST_OR_LAST, **TOO_EARLY},
        same_bits=True,
        allowed=Allowed(
            in_order=True,
            time=1.01,
            hint=f"{IN_ORDER} {NO_SYNC}",
        ),
        worth={"values": 3, "communication": 2},
    ),
    "defend_data_parallel": defence("data_parallel", drawn_chain),
}
