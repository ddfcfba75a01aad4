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
    seen: dict[int, Any] = {}  # keeps the objects alive, so that no id is used twice
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen[id(each)] = each
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, dict):
            waiting += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple | set | frozenset):
            waiting += each
        elif isinstance(each, types.FunctionType):
            waiting += [_content(cell) for cell in each.__closure__ or ()]
            waiting += [each.__defaults__, each.__kwdefaults__, vars(each)]
        elif isinstance(each, types.MethodType | classmethod | staticmethod):
            waiting += [each.__func__, getattr(each, "__self__", None)]
        elif isinstance(each, functools.partial):
            waiting += [each.func, each.args, each.keywords]
        elif isinstance(each, property):
            waiting += [each.fget, each.fset]
        elif isinstance(each, nn.Module) or _is_own(each):
            # The __dict__ of a class is a view, not a dict.
            waiting.append(dict(getattr(each, "__dict__", {})))
            waiting += each.__mro__ if isinstance(each, type) else type(each).__mro__


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that is not bound yet
        return None


def _is_own(each: Any) -> bool:
    """Return whether a class, or the class of an object, is the student's own."""
    module = (each if isinstance(each, type) else type(each)).__module__
    return module.partition(".")[0] not in ("torch", "course_lib", *sys.stdlib_module_names)
