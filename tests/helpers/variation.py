"""Which arguments of a student's function never vary over the cases of a check.

What no case varies, a wrong solution may ignore: the group, the learning rate, the dtype. So every
check is tried with a right solution, and what its function is called with is looked at.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.checking.cases import Case, Check, case_generator
from course_lib.ranks import Ranks, per_rank

Aspects = dict[str, str]
_BYTES = str(torch.uint8)
"""What is always bytes is data, not a dtype that one may rely on."""


def unvaried(name: str, check: Check, function: Callable[..., Any]) -> list[str]:
    """Return the aspects of arguments that are the same in all cases: ``lr``, ``group: members``.

    Args:
        name: ``assignment/check``.
        check: whose public cases are run, on simulated ranks.
        function: a right solution.

    """
    seen: dict[str, set[str]] = {}
    for case in check.cases:
        for aspect, value in _of_case(name, check, case, function):
            seen.setdefault(aspect, set()).add(value)
    seen = {aspect: values for aspect, values in seen.items() if values != {_BYTES}}
    return sorted(aspect for aspect, values in seen.items() if len(values) < 2)


def _of_case(
    name: str, check: Check, case: Case, function: Callable[..., Any]
) -> Iterator[tuple[str, str]]:
    parameters, program = inspect.signature(function), check.program  # judges need not travel

    def watched(mine: Any) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []

        @functools.wraps(function)
        def spy(*args: Any, **kwargs: Any) -> Any:
            bound = parameters.bind(*args, **kwargs)
            bound.apply_defaults()
            for key, value in bound.arguments.items():
                if inspect.isgenerator(value):
                    items = list(value)
                    found.append((f"{key}: kind", "generator"))
                    found.extend(_elements(key, items))
                    bound.arguments[key] = iter(items)
                else:
                    found.extend(aspects(key, value))
            return function(*bound.args, **bound.kwargs)

        program(spy, mine)
        return found

    inputs = check.inputs(case, case_generator("variation", name, case))
    with Ranks(case.world_size, on="simulated", network=case.network) as ranks:
        for found in ranks.run(watched, per_rank(inputs)):
            yield from found


def aspects(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield what a function might depend on of one argument: its name, and what it is here."""
    if name == "group" or isinstance(value, dist.ProcessGroup):
        members = dist.get_process_group_ranks(value or dist.group.WORLD)
        yield f"{name}: members", str(len(members))
        yield f"{name}: whole", str(len(members) == dist.get_world_size())
        yield f"{name}: begins with rank 0", str(members[0] == 0)
    elif isinstance(value, Tensor):
        yield from _of_tensor(name, value)
    elif isinstance(value, nn.Module):
        yield f"{name}: mode", str(value.training)
        for parameter in list(value.parameters())[:1]:
            yield from _of_tensor(f"{name}: parameters", parameter, shape=False)
    elif isinstance(value, list | tuple):
        yield f"{name}: kind", type(value).__name__
        yield from _elements(name, value)
    elif callable(value):
        if "<locals>" not in (words := getattr(value, "__qualname__", str(value))):
            yield name, words  # what the program makes for each case has a name without meaning
    else:
        yield name, repr(value)


def _elements(name: str, items: Any) -> Iterator[tuple[str, str]]:
    for item in items:
        if isinstance(item, Tensor):
            yield from _of_tensor(f"{name}: elements", item, shape=False)
            if isinstance(item, nn.Parameter):
                yield f"{name}: gradient", str(item.grad is not None)
                if item.grad is not None and item.grad.dim() > 1:
                    yield f"{name}: gradient's layout", str(item.grad.is_contiguous())


def _of_tensor(name: str, tensor: Tensor, shape: bool = True) -> Iterator[tuple[str, str]]:
    yield f"{name}: dtype", str(tensor.dtype)
    if tensor.dim() > 1 and tensor.numel() > 1 and min(tensor.shape) > 1:
        yield f"{name}: layout", str(tensor.is_contiguous())
    if shape:
        yield f"{name}: shape", str(tuple(tensor.shape))
