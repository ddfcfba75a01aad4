"""Find the tensors that an object holds."""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

_HOLDERS = (
    *(dict, list, tuple, set, frozenset, property, classmethod, staticmethod, functools.partial),
    *(types.FunctionType, types.MethodType, types.CellType, nn.Module),
)


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
        elif isinstance(holder, _HOLDERS) or _is_own(holder):
            if isinstance(holder, types.FunctionType):
                for attribute in ("__globals__", "__builtins__"):  # the notebook's, and Python's
                    names = getattr(holder, attribute)
                    visited[id(names)] = names
            waiting += gc.get_referents(holder)


def _is_own(holder: Any) -> bool:
    """Return whether a class, or the class of an object, is the student's own."""
    module = (holder if isinstance(holder, type) else type(holder)).__module__
    return module.partition(".")[0] not in ("torch", "course_lib", *sys.stdlib_module_names)
