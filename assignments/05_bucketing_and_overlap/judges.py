"""A chain of layers whose backward takes time: inputs, programs, judges.

A layer adds ``(w * x).sum()`` to a number, so the gradient of its weight w is x. In backward, the
layer computes for a while. A case says in which order the layers are used, and which layers are
left out, frozen or used twice, on each rank and in each micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.checking import Case, Expectation, Given, Observed, Wrong, equals
from course_lib.checking.answers import Judge
from course_lib.checking.expectations import computes_between, operations
from course_lib.checking.judges import Oracle
from course_lib.checking.shared.averaging import MISTAKES, Matrix, mean
from course_lib.ranks import Network, Trace, compute
from course_lib.ranks.costs.collective_time import collective_time

GRADIENTS = "gradient in step {} of parameter {}"


def chain_inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Draw weights, the same on all ranks, and for each rank the x of every use of a layer.

    The case has ``shapes``, one per layer, and ``steps``. A step is a list of micro-batches, and a
    micro-batch is a list of layers in the order of their use. A list of tuples gives each member of
    a group its own order. The case may have:

    - ``frozen``: layers that need no gradient; ``doubles``: those of dtype float64
    - ``before``: whether ``.grad`` has values before the first step; ``missing``: layers whose
      ``.grad`` is None all the same, on the first rank of a group
    - ``again``: layers that are listed a second time after the others, because they are tied
    - ``models``: lists of layers, one for each model; by default one model has all layers
    - ``interrupted``: whether an exception leaves every ``no_sync``; ``quiet``: numbers of models
      that stay inside their ``no_sync`` in the last micro-batch, too
    - ``in_place``: whether gradients are cleared in place; ``seconds`` that a layer computes
    - ``large``: a factor of all x, and of ``.grad`` before the first step; ``zero`` and
      ``overflown``: layers where these are zero, or have an inf, on the first rank of a group
    - ``replaced``: whether the caller puts other tensors into ``.grad`` before it finishes a step
    - ``buckets``: lists of layers; ``cap`` and ``first_cap``: in elements of the case's dtype
    """
    p = case.parameters
    shapes, frozen = p["shapes"], p.get("frozen", ())

    def draw(layers: Sequence[int]) -> list[Tensor]:
        return [torch.randn(shapes[i], generator=generator) for i in layers]

    def draw_x(layers: Sequence[int], me: int) -> list[Tensor]:
        drawn = [p.get("large", 1) * x for x in draw(layers)]
        for i, x in zip(layers, drawn, strict=True):
            if me == 0 and i in p.get("zero", ()):
                x.zero_()
            if me == 0 and i in p.get("overflown", ()):
                x.view(-1)[0] = torch.inf
        return drawn

    weights, inputs = draw(range(len(shapes))), []
    for rank in range(case.world_size):
        me = case.members(rank).index(rank)
        uses = [[order_of(batch, me) for batch in step] for step in p["steps"]]
        without = {*frozen, *(p.get("missing", ()) if me == 0 else ())}
        before = draw_x(range(len(shapes)), me) if p.get("before") else [None] * len(shapes)
        inputs.append(
            {
                "weights": weights,
                "before": [None if i in without else b for i, b in enumerate(before)],
                "uses": uses,
                "x": [[draw_x(layers, me) for layers in step] for step in uses],
                "frozen": list(frozen),
                "doubles": list(p.get("doubles", ())),
                "again": list(p.get("again", ())),
                "models": [list(m) for m in p.get("models", [range(len(shapes))])],
                "interrupted": p.get("interrupted", False),
                "quiet": list(p.get("quiet", ())),
                "replaced": p.get("replaced", False),
                "in_place": p.get("in_place", False),
                "seconds": p.get("seconds", 20e-6),
                "buckets": p.get("buckets", []),
                "cap": case.itemsize * p.get("cap", 0),
                "first_cap": case.itemsize * p.get("first_cap", 0),
            }
        )
    return inputs


def order_of(batch: Any, member: int) -> list[int]:
    """Return the layers that this member of a group uses in a micro-batch, in order."""
    each = bool(batch) and isinstance(batch[0], tuple)
    return list(batch[member % len(batch)] if each else batch)


def chain_params(mine: Any) -> list[nn.Parameter]:
    """Return the layers' weights as parameters, with their gradients from before the first step."""
    params = []
    for i, (weight, before) in enumerate(zip(mine["weights"], mine["before"], strict=True)):
        weight = weight.double() if i in mine["doubles"] else weight
        params.append(nn.Parameter(weight, requires_grad=i not in mine["frozen"]))
        params[-1].grad = None if before is None else before.to(weight.dtype, copy=True)
    return params


def chain_backward(
    params: Sequence[Tensor], layers: Sequence[int], xs: Sequence[Tensor], seconds: float
) -> None:
    """Do forward and backward of these layers; each takes `seconds` in backward."""
    device = params[0].device
    total = torch.zeros((), dtype=torch.float64, device=device, requires_grad=True)
    for i, x in zip(layers, xs, strict=True):
        total = total + (params[i] * x.to(params[i].dtype)).sum()
        # This runs before the layer's own gradient exists.
        total.register_hook(lambda _: compute(seconds))
    total.backward()


def cleared_gradients(params: Sequence[Tensor], in_place: bool) -> list[Tensor | None]:
    """Return copies of the gradients, and clear the gradients in one of zero_grad's two ways."""
    found = [None if param.grad is None else param.grad.clone() for param in params]
    for param in params:
        if in_place and param.grad is not None:
            param.grad.zero_()
        else:
            param.grad = None
    return found


def called(function: Any, what: str) -> Callable[..., Any]:
    """Return the function; raise TypeError if it is something else."""
    if not callable(function):
        raise TypeError(f"{what} is {type(function).__name__}, expected a function")
    return function


def local_sums(mine: Any, *, part: slice = slice(None)) -> list[list[Tensor]]:
    """Return the gradients of one rank before they are averaged, for each step.

    Args:
        mine: one rank's input.
        part: the micro-batches of a step to add, by default all. The first step adds them to the
            gradients from before.

    """
    steps = []
    for number, (uses, xs) in enumerate(zip(mine["uses"], mine["x"], strict=True)):
        sums = [torch.zeros_like(w, dtype=torch.float64) for w in mine["weights"]]
        batches = list(zip(uses, xs, strict=True))
        for layers, values in batches[part]:
            for i, value in zip(layers, values, strict=True):
                sums[i] = sums[i] + value
        if number == 0:
            sums = [s if b is None else s + b for s, b in zip(sums, mine["before"], strict=True)]
        steps.append(sums)
    return steps


def mixed(matrix: Matrix, **options: Any) -> Oracle:
    """Return the oracle in which member k ends with ``sum_j matrix[k, j] g_j``.

    Args:
        matrix: the mixture of the members' gradients g_j.
        **options: options of `local_sums`, which computes g_j.

    """

    def oracle(case: Case, inputs: Sequence[Any], me: int) -> Any:
        row = matrix(torch.ones(len(inputs), dtype=torch.float64))[me].tolist()
        each = [local_sums(mine, **options) for mine in inputs]
        return {GRADIENTS: [_mix(inputs[me], row, sums) for sums in zip(*each, strict=True)]}

    return oracle


def _mix(mine: Any, row: Sequence[float], sums: Sequence[Sequence[Tensor]]) -> list[Any]:
    made: list[Any] = []
    for i, weight in enumerate(mine["weights"]):
        total = torch.zeros_like(weight, dtype=torch.float64)
        for m, each in zip(row, sums, strict=True):
            total += m * each[i] if m else 0  # 0 times inf would be nan
        dtype = torch.float64 if i in mine["doubles"] else weight.dtype
        made.append(None if i in mine["frozen"] else total.to(dtype))
    return made


CHAIN_MISTAKES: dict[str, Oracle] = {
    name: mixed(MISTAKES[name])
    for name in (
        "the sum over the ranks, not the mean",
        "this rank's own gradient: nothing was averaged",
    )
} | {
    "the mean of the first micro-batch. Send nothing inside no_sync, even after an inner no_sync "
    "of the same model has ended": mixed(mean, part=slice(0, 1)),
}


def equals_chain(words: str = GRADIENTS) -> Judge:
    """Judge by the mean over the group of the gradients of every step.

    Args:
        words: the report's words. If they have only one ``{}``, there is one step.

    """

    def worded(oracle: Oracle) -> Oracle:
        def in_these_words(case: Case, inputs: Sequence[Any], me: int) -> Any:
            steps = oracle(case, inputs, me)[GRADIENTS]
            return {words: steps if words.count("{}") == 2 else steps[0]}

        return in_these_words

    return equals(worded(mixed(mean)), {m: worded(o) for m, o in CHAIN_MISTAKES.items()})


def bucket_bytes(case: Case, rank: int) -> list[int]:
    """Return the bytes of all launches of a rank: one for each bucket and step."""
    p = case.parameters
    itemsizes = [8 if i in p.get("doubles", ()) else case.itemsize for i in range(len(p["shapes"]))]
    sizes = [size * torch.Size(s).numel() for size, s in zip(itemsizes, p["shapes"], strict=True)]
    return [sum(sizes[i] for i in bucket) for bucket in p["buckets"]] * len(p["steps"])


def backward_time(case: Case) -> float:
    """Return the seconds that the first rank of a group computes in all steps."""
    batches = [batch for step in case.parameters["steps"] for batch in step]
    return float(case.parameters["seconds"]) * sum(len(order_of(batch, 0)) for batch in batches)


# On every rank ------------------------------------------------------------------------------------


# Three programs: one sends a bucket, one hooks buckets, and one makes parameters data parallel. If
# a case has several models, each has its own call, and all of them are in progress at once.


def send_program(send_bucket: Callable[..., Any], mine: Any, given: Given) -> Any:
    """Call ``send_bucket(params, group=group)``, compute for a while, and call the result."""
    params = chain_params(mine)
    sent = [
        called(
            send_bucket(given.iterable([params[i] for i in model]), group=given.group),
            "what send_bucket returns",
        )
        for model in mine["models"]
    ]
    compute(50 * mine["seconds"])
    for finish in sent[::-1]:
        finish()
    return {"gradient of parameter {}": _gradients(params, mine)}


def send_computes(own: Any) -> dict[float, int]:
    """Return seconds → how often `send_program` computes that long."""
    return {50 * own["seconds"]: 1}


def hooks_program(hook_buckets: Callable[..., Any], mine: Any, given: Given) -> Any:
    """Call ``hook_buckets(buckets, group=group)``; in each step, do backward and ``finish()``."""
    params, finishes = chain_params(mine), []
    for model in mine["models"]:
        buckets: Any = [[params[i] for i in b] for b in mine["buckets"] if b[0] in model]
        buckets = tuple(buckets) if mine["in_place"] else buckets
        made = hook_buckets(buckets, group=given.group)
        finishes.append(called(made, "what hook_buckets returns"))
    found = []
    for uses, xs in zip(mine["uses"], mine["x"], strict=True):
        chain_backward(params, uses[0], xs[0], mine["seconds"])
        _replace_gradients(params, mine)
        for finish in finishes[::-1]:
            finish()
        _gradients(params, mine)
        found.append(cleared_gradients(params, mine["in_place"]))
    return {GRADIENTS: found}


def hooks_computes(own: Any) -> dict[float, int]:
    """Return the times that `hooks_program` computes, in each step's first micro-batch only."""
    return {own["seconds"]: sum(len(uses[0]) for uses in own["uses"])}


class _InterruptedError(Exception):
    """Leaves a context early."""


def parallel_program(data_parallel: Callable[..., Any], mine: Any, given: Given) -> Any:
    """Call ``data_parallel(params, cap, first_cap, group=group)``; accumulate and ``finish()``."""
    params = chain_params(mine)
    finishes, contexts = [], []
    for model in mine["models"]:
        tied = [params[i] for i in (*model, *(i for i in mine["again"] if i in model))]
        finish, no_sync = _pair(
            data_parallel(given.iterable(tied), mine["cap"], mine["first_cap"], group=given.group)
        )
        finishes.append(finish)
        contexts.append(no_sync)

    def back(use: Sequence[int], x: Sequence[torch.Tensor]) -> None:
        for context in contexts:  # entering and leaving it again must not end the outer contexts
            with context():
                pass
        chain_backward(params, use, x, mine["seconds"])

    found = []
    for uses, xs in zip(mine["uses"], mine["x"], strict=True):
        *local, last = zip(uses, xs, strict=True)
        for use, x in local:
            _inside(contexts, mine["interrupted"], partial(back, use, x))
        quiet = [contexts[i] for i in mine["quiet"]]
        _inside(quiet, False, partial(chain_backward, params, *last, mine["seconds"]))
        _replace_gradients(params, mine)
        for finish in finishes[::-1]:
            finish()
        _gradients(params, mine)
        found.append(cleared_gradients(params, mine["in_place"]))
    return {GRADIENTS: found}


def parallel_computes(own: Any) -> dict[float, int]:
    """Return the times that `parallel_program` computes, in every micro-batch."""
    return {own["seconds"]: sum(len(use) for uses in own["uses"] for use in uses)}


def _pair(made: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    if not isinstance(made, tuple) or len(made) != 2:
        raise TypeError(f"data_parallel returns {type(made).__name__}, expected (finish, no_sync)")
    return called(made[0], "finish"), called(made[1], "no_sync")


def _inside(
    contexts: Sequence[Callable[[], Any]], interrupted: bool, call: Callable[[], object]
) -> None:
    """Make the call inside all these contexts; if `interrupted`, leave them by an exception."""
    if not contexts:
        call()
        return
    try:
        with contexts[0]():
            _inside(contexts[1:], interrupted, call)
            if interrupted:
                raise _InterruptedError
        if interrupted:
            raise RuntimeError(
                "no_sync swallows an exception. An exception inside no_sync must reach the caller"
            )
    except _InterruptedError:
        pass


def _replace_gradients(params: Sequence[nn.Parameter], mine: Any) -> None:
    """Put a copy into every .grad, as code that unscales gradients does, if the case wants it."""
    for param in params if mine["replaced"] else ():
        param.grad = None if param.grad is None else param.grad.clone()


def _gradients(params: Sequence[nn.Parameter], mine: Any) -> list[torch.Tensor | None]:
    """Return the gradients; raise RuntimeError if different parameters are frozen than before."""
    if [i for i, param in enumerate(params) if not param.requires_grad] != sorted(mine["frozen"]):
        raise RuntimeError("the function changes which parameters require a gradient")
    return [param.grad for param in params]


# Expectations of the communication ------------------------------------------------------------


def launches(case: Case, rank: int) -> int:
    """Return the number of all-reduces: one for each bucket and step."""
    return len(bucket_bytes(case, rank))


def gradient_bytes(case: Case, rank: int) -> int:
    """Return the number of bytes of all gradients."""
    return case.itemsize * sum(torch.Size(shape).numel() for shape in case.parameters["shapes"])


@Expectation
def one_order(case: Case, observed: Observed, trace: Trace) -> None:
    """Expect the all-reduces in the order of the buckets, step after step."""
    for rank in range(case.world_size):
        launched = [event.bytes for event in operations(trace, rank, ["all_reduce"])]
        expected = bucket_bytes(case, rank)
        if launched != expected and len(case.members(rank)) > 1:  # a rank alone need not send
            raise Wrong(
                f"rank {rank} launches {launched}, expected the order {expected}",
                "These are the bytes of each all-reduce. Launch the buckets in their order, even "
                "where some are not complete.",
            )


def where(key: str, hint: str, expectation: Expectation) -> Expectation:
    """Return the expectation with a hint, for the cases whose parameters have `key`."""

    def test(case: Case, observed: Observed, trace: Trace) -> None:
        if case.parameters.get(key):
            try:
                expectation.test(case, observed, trace)
            except Wrong as wrong:
                raise Wrong(wrong.message, hint) from None

    return Expectation(test)


def computed_at_launches(case: Case, observed: Observed, rank: int) -> list[tuple[float, float]]:
    """Return for each launch what backward must have computed before, and at most at its end.

    A bucket needs its last gradient, and is launched after all earlier buckets. It has ended when
    its step ends.
    """
    if not case.parameters.get("timed"):
        return []
    me, bounds, layers = case.members(rank).index(rank), [], 0
    for step in case.parameters["steps"]:
        *local, last = [order_of(batch, me) for batch in step]
        before = layers + sum(map(len, local))
        layers, needed = before + len(last), before
        done = {layer: before + i for i, layer in enumerate(reversed(last), start=1)}
        for bucket in case.parameters["buckets"]:
            needed = max([needed, *(done.get(layer, 0) for layer in bucket)])
            bounds.append((needed, layers))
    seconds = case.parameters["seconds"]
    return [(seconds * least, seconds * most) for least, most in bounds]


AS_COMPUTED = computes_between(computed_at_launches, "all_reduce")


def overlapped_time(case: Case, network: Network) -> float:
    """Return the least time, in which only the last bucket is left when backward is over."""
    last, steps = bucket_bytes(case, 0)[-1], len(case.parameters["steps"])
    left = collective_time(
        "all_reduce", network, len(case.members(0)), last, itemsize=case.itemsize
    )
    return 1.01 * (backward_time(case) + steps * left)
