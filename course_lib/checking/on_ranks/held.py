"""Find the tensors that an object holds."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


def held_by(value: Any) -> Iterator[Tensor]:
    """Yield each tensor that a value holds, once, at any depth.

    The search goes into containers, the attributes of objects, and functions: their closures, their
    defaults, and the objects that methods are bound to. It ignores global names, because they
    belong to the notebook, and objects of PyTorch's own classes, except for modules.
    """
    visited: dict[int, Any] = {}  # keeps the objects alive, so that no id is used twice
    waiting = [value]
    while waiting:
        holder = waiting.pop()
        if id(holder) in visited:
            continue
        visited[id(holder)] = holder
        if isinstance(holder, Tensor):
            yield holder
        elif isinstance(holder, dict):
            waiting += [*holder.keys(), *holder.values()]
        elif isinstance(holder, list | tuple | set | frozenset):
            waiting += holder
        elif isinstance(holder, types.FunctionType):
            waiting += [_content(cell) for cell in holder.__closure__ or ()]
            waiting += [holder.__defaults__, holder.__kwdefaults__, vars(holder)]
        elif isinstance(holder, types.MethodType | classmethod | staticmethod):
            waiting += [holder.__func__, getattr(holder, "__self__", None)]
        elif isinstance(holder, functools.partial):
            waiting += [holder.func, holder.args, holder.keywords]
        elif isinstance(holder, property):
            waiting += [holder.fget, holder.fset]
        elif isinstance(holder, nn.Module) or _is_own(holder):
            # The __dict__ of a class is a view, not a dict.
            waiting.append(dict(getattr(holder, "__dict__", {})))
            waiting += holder.__mro__ if isinstance(holder, type) else type(holder).__mro__


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that is not bound yet
        return None


def _is_own(holder: Any) -> bool:
    """Return whether a class, or the class of an object, is the student's own."""
    module = (holder if isinstance(holder, type) else type(holder)).__module__
    return module.partition(".")[0] not in ("torch", "course_lib", *sys.stdlib_module_names)
