"""The checks of this assignment. They are handed out: read them if a message is not enough.

A check has a reference in `course_lib`, a program that calls a function on a rank, and a draw that
makes a case from a seed. A program gets only its rank's input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.checking import Allowed, Case, Draw, Given, Variety, Wrong, by_reference
from course_lib.checking.defence import defence, drawn_network, one_of
from course_lib.checking.on_ranks.given import expect_function, expect_pair
from course_lib.checking.on_ranks.leaves import with_tensors
from course_lib.ranks import compute
from course_lib.ranks.explain.words import format_table

LARGE, ZEROS, OVERFLOW = "large numbers", "only zeros on rank {}", "an inf or NaN on rank {}"


def draw_numbers(d: Draw, unusual: dict[str, int], rank: int, shape: Sequence[int]) -> Tensor:
    """Draw a tensor of a rank, which may be `LARGE`, `ZEROS` or with an `OVERFLOW`."""
    numbers = d.randn(*shape)
    if LARGE in unusual:
        numbers = 300 * numbers
    if unusual.get(ZEROS) == rank:
        numbers = 0 * numbers
    return d.not_finite(numbers) if unusual.get(OVERFLOW) == rank else numbers


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


def draw_assign(d: Draw) -> list[Any]:
    """Draw parameters and caps. The first call comes again after two others."""
    unusual = d.unusual(
        *("two dtypes", "two dtypes", "two bytes each", "some are frozen", "some are empty"),
        *("some are there twice", "one larger than the cap", "one parameter", "cap 0"),
    )
    n = 1 if "one parameter" in unusual else d.one_of(4, 5, 6, 7)
    dtypes, unit = ["float32"], 4
    if "two bytes each" in unusual:
        dtypes, unit = ["bfloat16"], 2
    if "two dtypes" in unusual:
        dtypes.append("float64")
    numels = (0, 0, 2, 3) if "some are empty" in unusual else (1, 1, 2, 2, 3, 5)
    sizes = [d.one_of(*numels) for _ in range(n)]
    if "one larger than the cap" in unusual:
        sizes[d.one_of(*range(n))] = 30
    count = d.one_of(2, 3, n) if "some are frozen" in unusual else 0
    frozen = {d.one_of(*range(n)) for _ in range(count)}
    order = [*range(n)]
    for _ in range(d.one_of(1, 2) if "some are there twice" in unusual else 0):
        order.insert(d.one_of(*range(len(order) + 1)), d.one_of(*range(n)))

    def draw_caps() -> tuple[int, int]:
        cap = 0 if "cap 0" in unusual else unit * d.one_of(3, 4, 6, 8, 10) + d.one_of(0, 0, 1)
        return cap, unit * d.one_of(1, 2, 4, 12) + d.one_of(0, 0, 1)

    tensors = [(size, d.one_of(*dtypes), i not in frozen) for i, size in enumerate(sizes)]
    caps = draw_caps()
    calls = [(order, caps), (order, draw_caps()), (order[::-1], caps), (order, caps)]
    return [{"tensors": tensors, "calls": calls, "gradients": d.one_of(False, True)}]


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
        note = "" if trainable else "frozen"
        note = f"the same tensor as {first}" if first < position else note
        size = elements * getattr(torch, dtype).itemsize
        rows.append((str(position), str(size), dtype, note))
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
        weight = weight.double() if i in inputs["doubles"] else weight
        params.append(nn.Parameter(weight, requires_grad=i not in inputs["frozen"]))
        params[-1].grad = None if before is None else before.to(weight.dtype, copy=True)
    return params


def draw_bucket(d: Draw) -> list[Any]:
    """Draw the same weights for every rank, and different gradients; some may be missing."""
    unusual = d.unusual(
        *("an empty parameter", "two buckets at once", "a gradient that no rank has"),
        *("rank {} lacks a gradient", "rank {} has no gradients", LARGE, ZEROS, OVERFLOW),
    )
    shapes = d.one_of([(3, 2), (5,)], [(2, 3), (4,), ()], [(3, 2), (6,)])
    if "an empty parameter" in unusual:
        shapes = [*shapes[:1], (0,), *shapes[1:]]
    places = [*range(len(shapes))]
    buckets = [places[::2], places[1::2]] if "two buckets at once" in unusual else [places]
    place = d.one_of(*places)
    weights = [d.randn(*shape) for shape in shapes]

    def gradients_of(rank: int) -> list[Tensor | None]:
        gradients = [draw_numbers(d, unusual, rank, shape) for shape in shapes]
        if unusual.get("rank {} lacks a gradient") == rank:
            gradients[place] = None
        if "a gradient that no rank has" in unusual:
            gradients[place - 1] = None
        if unusual.get("rank {} has no gradients") == rank:
            return [None for _ in gradients]
        return gradients

    common = {"weights": weights, "frozen": [], "doubles": [], "buckets": buckets}
    return [{**common, "before": gradients_of(rank)} for rank in d.ranks]


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
PLAIN: dict[str, Any] = {
    "frozen": [],
    "doubles": [],  # layers whose weights are float64
    "tied": [],  # layers that are listed, and used, twice
    "replaced": False,  # the program replaces .grad between backward and finish()
    "interrupted": False,  # an exception leaves each no_sync
    "silent": [],  # models that are in no_sync even in the last backward of a step
}


def run_hooks(hook_buckets: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Call ``hook_buckets(buckets, group=group)``; in each step, do backward and ``finish()``.

    If there are two models, each has its own call, and both take their steps at once.
    """
    params, finishes = parameters_of(inputs), []
    for model in inputs["models"]:
        places = [bucket for bucket in inputs["buckets"] if bucket[0] in model]
        buckets = tuple([params[i] for i in bucket] for bucket in places)
        finish = hook_buckets(buckets, group=case.group)
        finishes.append(expect_function(finish, "what hook_buckets returns"))
    return run_training(params, inputs, finishes)


def run_training(
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
        *first_batches, last_batch = step
        for batch in first_batches:
            with inside(no_syncs, inputs["interrupted"]):
                for no_sync in no_syncs:
                    with no_sync():  # the outer block must not end with this inner one
                        pass
                backward(params, batch, inputs["seconds"])
        with inside([no_syncs[i] for i in inputs["silent"]]):
            backward(params, last_batch, inputs["seconds"])
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


@contextmanager
def inside(contexts: Sequence[Callable[[], Any]], interrupted: bool = False) -> Iterator[None]:
    """Enter all these contexts; if `interrupted`, an exception leaves them at the end."""
    try:
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            yield
            if interrupted:
                raise _InterruptedError
    except _InterruptedError:
        return
    if interrupted:
        raise RuntimeError(
            "no_sync swallows an exception. An exception inside no_sync must reach the caller"
        )


CHAIN_KINDS = (
    *("layers that take time", "layers that take time", "a layer used twice", "two dtypes"),
    *("layers that nobody uses", "a step without backward"),
)
RANK_KINDS = "each rank its own order", *2 * ("rank {} leaves layers out",)
LAYER_KINDS = "an empty layer", "a frozen layer", ".grad is replaced"


def draw_chain(d: Draw, several: bool) -> tuple[list[Any], dict[str, int]]:
    """Draw a chain of layers and steps; return the ranks' inputs, and what is unusual.

    `several`: a step may have several micro-batches.
    """
    kinds = (*CHAIN_KINDS, *2 * ("exceptions leave no_sync",)) if several else CHAIN_KINDS
    two = d.maybe("two models at once", one_in=4)
    # Two models must launch their buckets in one order, so the ranks use the same layers there.
    unusual = d.unusual(*kinds, *(() if two else RANK_KINDS))
    interrupted = "exceptions leave no_sync" in unusual
    special_rank, kind = d.one_of(*d.ranks), d.one_of("", *LAYER_KINDS, LARGE, ZEROS, OVERFLOW)
    if kind:
        d.say(kind.format(special_rank))
        unusual[kind] = special_rank
    filled = d.one_of(True, False)
    if filled:
        d.say(".grad is not empty")
    long, twice = "layers that take time" in unusual, "a layer used twice" in unusual
    n = d.one_of(8, 12) if long else d.one_of(3, 4, 6)
    order = [*range(n)]
    shapes = [(d.one_of(16, 64, 200),) if long else (i + 1, 2) for i in order]
    # With two models, the first one has enough layers to lose one.
    special_layer = d.one_of(*order[n // 2 if two else 0 :])
    if "an empty layer" in unusual:
        shapes[special_layer] = (0,)
    frozen = [special_layer] if "a frozen layer" in unusual else []
    counts = [2, 3] if interrupted else [1, 1, 2, 3] if several else [1]
    steps = [[*range(d.one_of(*counts))] for _ in range(d.one_of(2, 3))]
    left_out = [
        [{d.one_of(*order) for _ in range(d.one_of(1, 2, n))} for _ in step] for step in steps
    ]

    def draw_batch(rank: int, step: int, batch: int) -> list[tuple[int, Tensor]]:
        if "a step without backward" in unusual and step == len(steps) - 1:
            return []
        uses = shuffled(d, order) if "each rank its own order" in unusual else order
        if "layers that nobody uses" in unusual or unusual.get("rank {} leaves layers out") == rank:
            uses = [i for i in uses if i not in left_out[step][batch] or 0 in shapes[i]]
        uses = [*uses, *uses[:1]] if twice else uses
        return [(i, draw_numbers(d, unusual, rank, shapes[i])) for i in uses]

    common = {
        **PLAIN,
        "weights": [d.randn(*shape) for shape in shapes],
        "frozen": frozen,
        "tied": order[:1] if twice else [],
        "models": [order[n // 2 :], order[: n // 2]] if two else [order],
        "in_place": [d.one_of(True, False) for _ in steps],
        "replaced": ".grad is replaced" in unusual,
        "interrupted": interrupted,
        "seconds": d.one_of(100e-6, 200e-6) if long else 20e-6,
    }
    inputs = []
    for rank in d.ranks:
        batches = [[draw_batch(rank, s, b) for b in step] for s, step in enumerate(steps)]
        before = [d.randn(*shape) if filled else None for shape in shapes]
        before = [None if i in frozen else gradient for i, gradient in enumerate(before)]
        inputs.append({**common, "steps": batches, "before": before})
    return inputs, unusual


def shuffled(d: Draw, items: Sequence[int]) -> list[int]:
    """Return the items in another order."""
    pool = [*items]
    return [pool.pop(d.one_of(*range(len(pool)))) for _ in items]


def draw_hooks(d: Draw) -> list[Any]:
    """Draw a chain of layers, and cut the trained ones into buckets, from the last to the first."""
    inputs, unusual = draw_chain(d, several=False)
    buckets = []
    for model in inputs[0]["models"]:
        trained = [i for i in reversed(model) if i not in inputs[0]["frozen"]]
        cuts = {d.one_of(*range(len(trained))) for _ in range(d.one_of(1, 3))}
        buckets += [trained[a:b] for a, b in pairwise(sorted({0, *cuts, len(trained)}))]
    changes = {"buckets": buckets, "doubles": []}
    if "two dtypes" in unusual:
        changes["doubles"] = d.one_of(*buckets)
    return [{**rank_inputs, **changes} for rank_inputs in inputs]


def of_the_step_before(inputs: Sequence[Any], me: int, expected: Sequence[Any]) -> Any:
    steps = expected[me][GRADIENTS]
    return {GRADIENTS: [steps[0], *steps[:-1]]}


def with_batches(
    change: Callable[[list[Any]], list[Any]], with_before: bool = True
) -> Callable[..., Any]:
    """Return the change of inputs that takes `change(micro-batches)` for those of each step.

    Where ranks use different layers, they send at different moments: there it changes nothing.
    """

    def changed(inputs: Sequence[Any]) -> Sequence[Any]:
        layers = [
            [[i for i, _ in batch] for step in member["steps"] for batch in step]
            for member in inputs
        ]
        if layers[1:] != layers[:-1]:
            return inputs
        empty = {} if with_before else {"before": [None for _ in inputs[0]["before"]]}
        return [
            {**member, "steps": [change(step) for step in member["steps"]], **empty}
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
        with_batches(lambda step: [*step[:-1], []])
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
        finish, no_sync = expect_pair(functions, "data_parallel", "(finish, no_sync)")
        finishes.append(expect_function(finish, "finish"))
        no_syncs.append(expect_function(no_sync, "no_sync"))
    return run_training(params, inputs, finishes, no_syncs)


def draw_parallel(d: Draw) -> list[Any]:
    """Draw a chain of layers, micro-batches and caps."""
    inputs, unusual = draw_chain(d, several=True)
    if max(len(step) for step in inputs[0]["steps"]) > 1:
        d.say("no_sync")
    silent = d.one_of([0], [1], []) if inputs[0]["models"][1:] else []
    if silent:
        d.say("one of them always in no_sync")
    places, unit = range(len(inputs[0]["weights"])), d.dtype.itemsize
    doubles = [d.one_of(*places), d.one_of(*places)] if "two dtypes" in unusual else []
    cap, first = (5, 7, 10, 24), (1, 2, 7, 40)
    if len(places) >= 8:
        cap, first = (128, 256, 400), (16, 64)
    caps = [unit * d.one_of(*cap) + d.one_of(0, 0, 1), unit * d.one_of(*first)]
    changes = {"doubles": doubles, "silent": silent, "caps": caps}
    return [{**rank_inputs, **changes} for rank_inputs in inputs]


NO_SYNC = "A tied parameter is in one bucket, once. Send nothing in no_sync."
FIRST_OR_LAST = {
    "the mean of the first micro-batch. Send nothing inside no_sync, even after an inner no_sync "
    "of the same model has ended": with_batches(lambda step: step[:1]),
    "the mean of the last micro-batch: send the sums that .grad holds": (
        with_batches(lambda step: step[-1:], with_before=False)
    ),
}

# Task 5: who delayed the step ---------------------------------------------------------------------


def run_frontier(frontier: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Call ``frontier(durations)``, which returns two tensors."""
    answer = frontier(inputs["durations"])
    increments, leaders = expect_pair(answer, "frontier", "(increments, leaders)")
    return {"increments": increments, "leaders": leaders}


def draw_durations(d: Draw) -> list[Any]:
    """Draw the stages of a step in 1/1024 s, so no sum is rounded; two ranks may tie."""
    k, stages = d.one_of(2, 3, 4, 5, 6), d.one_of(2, 3, 4, 5, 6)
    k, stages = d.maybe("one rank", 1, k, one_in=6), d.maybe("one stage", 1, stages, one_in=6)
    d.say(f"{k} x {stages}")
    durations = 1 + d.whole(1000, k, stages)
    tied = sorted({d.one_of(*range(k)), d.one_of(*range(k))})
    if d.maybe("ranks that end their last stage together"):
        durations[tied[0]] = durations.amax(0)
        durations[tied[-1]] = durations[tied[0]].flip(0)
    if d.maybe("equal ranks"):
        durations[tied] = durations.amax(0)
    durations *= d.maybe("first stage without time", torch.arange(stages) > 0, 1)
    return [{"durations": durations.double() / 1024}]


def of_stages_alone(inputs: Sequence[Any], me: int, expected: Sequence[Any]) -> Any:
    longest, leaders = inputs[me]["durations"].max(0)
    return {"increments": longest, "leaders": leaders}


FRONTIER_MISTAKES = {
    "the longest duration of each stage. First add up each rank's stages": of_stages_alone,
    "the means over the ranks: they hide who was late": lambda inputs, me, _: {
        "increments": inputs[me]["durations"].mean(0)
    },
    "the frontier itself; an increment is the difference to the stage before": (
        lambda inputs, me, _: {"increments": inputs[me]["durations"].cumsum(1).amax(0)}
    ),
}

# Task 6: questions on the student's own run -------------------------------------------------------


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

    common = {**PLAIN, "weights": draw(), "before": [None] * layers, "models": [[*range(layers)]]}
    common |= {"in_place": [False], "seconds": 1e-6 * micros, "caps": [4 * cap, 4 * first_cap]}
    inputs = [
        {**common, "steps": [[[(i, x) for i, x in enumerate(draw()) if i != unused]]]}
        for _ in range(k)
    ]
    return Case(name, k, network=network), inputs


# The checks ---------------------------------------------------------------------------------------

CHECKS = {
    "assign_buckets": by_reference(
        "assign_buckets",
        seeds=(1, 2, 4, 5, 8, 19, 27, 29, 30, 40),
        reference="course_lib.bucketing:trained_buckets",
        program=run_assign,
        draw=draw_assign,
        variety=Variety(ranks=(1,), dtypes=("float32",), layouts=(), groups=False),
        judge=right_buckets,
    ),
    "send_bucket": by_reference(
        "send_bucket",
        seeds=(2, 14, 17, 20, 24, 28, 31, 40, 45, 51, 57),
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
        seeds=(3, 9, 13, 15, 24, 27, 39, 40, 44, 49, 51, 57),
        reference="course_lib.ddp.functions:hook_buckets",
        program=run_hooks,
        draw=draw_hooks,
        mistakes=CHAIN_MISTAKES,
        as_if=TOO_EARLY,
        same_bits=True,
        allowed=Allowed(in_order=True, time=1.01, hint=IN_ORDER),
        worth={"values": 2, "communication": 2},
    ),
    "data_parallel": by_reference(
        "data_parallel",
        seeds=(3, 9, 11, 14, 15, 28, 31, 41, 44, 46, 51, 54),
        reference="course_lib.ddp.functions:data_parallel",
        program=run_parallel,
        draw=draw_parallel,
        mistakes=CHAIN_MISTAKES,
        as_if={**FIRST_OR_LAST, **TOO_EARLY},
        same_bits=True,
        allowed=Allowed(in_order=True, time=1.01, hint=f"{IN_ORDER} {NO_SYNC}"),
        worth={"values": 2, "communication": 2},
    ),
    "frontier": by_reference(
        "frontier",
        seeds=(1, 4, 5, 6, 15, 16, 20, 27, 28),
        reference="course_lib.frontier:frontier",
        program=run_frontier,
        draw=draw_durations,
        variety=Variety(ranks=(1,), dtypes=("float32", "float64"), groups=False),
        mistakes=FRONTIER_MISTAKES,
        exact=True,
    ),
    "defend_data_parallel": defence("data_parallel", drawn_chain),
}
