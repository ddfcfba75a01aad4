"""Inside a plain value: its leaves, each with a name for its place; its tensors, changed or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from course_lib.ranks.wire import MAX_NAME

ARRAY = "a NumPy array"
"""Key of the dict that stands for an array; its value is a tensor with the array's numbers."""


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a plain value."""
    return (leaf for _, leaf in leaves(value) if isinstance(leaf, Tensor))


def with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the plain value with `change(tensor)` for each tensor, in new containers."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: with_tensors(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(with_tensors(item, change) for item in value)
    return value


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and values; NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_floating_point():
        a = a.detach()
        return torch.equal(a, b) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    return torch.equal(a.detach(), b)


def leaves(value: Any, name: str = "", like: Any = None) -> Iterator[tuple[str, Any]]:
    """Yield the tensors, numbers, texts and Nones of a plain value, each with a name for its place.

    If `like` has a leaf at a place, the value there is yielded as a whole, even if it is a list.
    Of a name, only the first `MAX_NAME` characters are kept; no check asks for a longer one.
    """
    name = name[:MAX_NAME]
    if like is not None and not isinstance(like, dict | list | tuple):
        yield name, value
    elif isinstance(value, dict):
        below = like if isinstance(like, dict) else {}
        for key, item in value.items():
            yield from leaves(item, f"{name} {key}".strip(), below.get(key))
    elif isinstance(value, list | tuple):
        rows = like if isinstance(like, list | tuple) else ()
        for i, item in enumerate(value):
            yield from leaves(item, numbered(name, i), rows[i] if i < len(rows) else None)
    else:
        yield name, value


def numbered(name: str, i: int) -> str:
    """Return the name of item `i` of the list with this name, whose ``{}`` stands for a number."""
    return name.replace("{}", str(i), 1) if "{}" in name else f"{name}[{i}]"


def without_numbers(name: str) -> str:
    """Return the name, without ``{}``, of a value that should be a list and is not.

    Such a value has no items that could be numbered. For example, `leaves` gives the name
    ``weights of pull 0, parameter {}`` to the value of a pull that is not a list.
    """
    before, braces, _ = name.partition("{}")
    return (before.rpartition(", ")[0] or before.strip()) if braces else name
