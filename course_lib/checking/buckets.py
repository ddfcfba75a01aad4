"""Buckets: which gradients travel together. Questions, program, and judges of the answers.

The judges look for what is wrong and do not compute what is right: students can read them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from course_lib.checking.answers import WHOLE, Kind, ListOf, sees
from course_lib.checking.cases import Case, Wrong
from course_lib.checking.on_ranks.given import Given


def assign_program(assign_buckets: Callable[..., Any], mine: Any, given: Given) -> Any:
    """Call ``assign_buckets(params, cap, first_cap)`` for parameters as `asked` describes them.

    It is called twice: what it keeps from the first call must not matter in the second.
    """
    made: dict[str, nn.Parameter] = {}  # the same name is the same tensor
    for name, elements, dtype, trainable in mine["tensors"]:
        # A part of something larger: a tensor's memory does not say how large the tensor is.
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
        raise RuntimeError("assign_buckets changes .grad: it was asked for positions only")
    if answers[1] != answers[0]:
        raise RuntimeError(
            f"assign_buckets gives {answers[0]}, and {answers[1]} when it is called once more: it "
            "keeps something from one call to the next"
        )
    return answers[0]


_BUCKETS = ListOf(ListOf(Kind("an index", WHOLE.test, "indices"), most=100), most=100)


@sees(_BUCKETS)
def every_parameter_once(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
    """Judge whether each parameter that needs a gradient is in one bucket, once."""
    tensors, buckets = case.parameters["tensors"], values[0]
    flat, names = [i for bucket in buckets for i in bucket], [tensor[0] for tensor in tensors]
    if not all(0 <= i < len(tensors) for i in flat):
        raise Wrong(f"{buckets} is not made of indices from 0 to {len(tensors) - 1}")
    for i in flat:
        first = names.index(names[i])
        if not tensors[i][3]:
            raise Wrong(f"parameter {i} is frozen, and in a bucket: {buckets}")
        if flat.count(i) > 1:
            raise Wrong(f"parameter {i} is in the buckets twice: {buckets}")
        if i != first:
            raise Wrong(
                f"parameters {first} and {i} are one tensor, expected only {first} in {buckets}",
                "Its gradient is complete when the earliest layer has added to it.",
            )
    wanted = [i for i, t in enumerate(tensors) if t[3] and names.index(names[i]) == i]
    if lost := [i for i in wanted if i not in flat]:
        raise Wrong(f"of the parameters, {lost} are in no bucket: {buckets}")


@sees(_BUCKETS)
def well_cut(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
    """Judge dtypes, order and sizes of the buckets."""
    tensors, cap, first_cap = (case.parameters[key] for key in ("tensors", "cap", "first_cap"))
    buckets = values[0]
    sizes = [elements * getattr(torch, dtype).itemsize for _, elements, dtype, _ in tensors]
    last: dict[str, tuple[Any, int]] = {}  # dtype → its last bucket so far, and that one's limit
    for bucket in buckets:
        kinds, total = {tensors[i][2] for i in bucket}, sum(sizes[i] for i in bucket)
        if len(kinds) != 1:
            raise Wrong(f"bucket {bucket} of {buckets} has {len(kinds)} dtypes, expected one")
        if list(bucket) != sorted(bucket, reverse=True):
            raise Wrong(
                f"bucket {bucket} of {buckets} is not in reverse order",
                "The gradients of later parameters are ready earlier.",
            )
        (kind,) = kinds
        before, room = last.get(kind, (None, 0))
        name, limit = ("cap", cap) if before else ("first_cap", min(cap, first_cap))
        if total > limit and len(bucket) > 1:
            raise Wrong(f"bucket {bucket} of {buckets} has {total} B, {name} is {limit} B")
        if before and before[-1] < bucket[0]:
            raise Wrong(
                f"bucket {before} of {buckets} comes before {bucket}, and is complete after it",
                "The gradients of later parameters are ready earlier.",
            )
        if before and sum(sizes[i] for i in before) + sizes[bucket[0]] <= room:
            raise Wrong(f"bucket {before} of {buckets} still has room for parameter {bucket[0]}")
        last[kind] = bucket, limit
    ends = [bucket[-1] for bucket in buckets]
    if ends != sorted(ends, reverse=True):
        raise Wrong(
            f"the buckets {buckets} are not in the order in which they are complete",
            "A bucket is complete when its last parameter's gradient is there.",
        )


def asked(
    cap: int,
    first_cap: int,
    *sizes: int,
    dtypes: Sequence[str] = (),
    frozen: Sequence[int] = (),
    same: Sequence[tuple[int, int]] = (),
    gradients: bool = False,
) -> dict[str, Any]:
    """Return what a case asks: caps in bytes, and parameters of so many elements.

    Args:
        cap: of every bucket but the first.
        first_cap: of the first one.
        *sizes: of the parameters.
        dtypes: of the first parameters; those that follow are float32.
        frozen: positions of parameters that need no gradient.
        same: pairs of positions (i, j), i < j, of one tensor.
        gradients: whether there are gradients already, which changes nothing.

    """
    names = {j: i for i, j in same}
    kinds = [*dtypes, *["float32"] * (len(sizes) - len(dtypes))]
    tensors = [(f"w{names.get(i, i)}", n, kinds[i], i not in frozen) for i, n in enumerate(sizes)]
    return {"cap": cap, "first_cap": first_cap, "tensors": tensors, "gradients": gradients}
