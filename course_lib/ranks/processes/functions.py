"""A function of the notebook as what pickle can send: what cloudpickle makes of it, made sooner.

It is sent with every call, so that the ranks run what stands in the notebook now. Two things took
most of the time: the 18 fields of a code object, one by one, and the search of all imported modules
for those that the function may reach through a package that it names.
"""

from __future__ import annotations

import marshal
import sys
from collections.abc import Iterable
from types import CodeType, FunctionType, ModuleType
from typing import Any

from cloudpickle import cloudpickle

_SLOTS = ("__name__", "__qualname__", "__annotations__", "__kwdefaults__", "__defaults__",
          "__module__", "__doc__", "__closure__")  # fmt: skip


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's, but for functions that the reader cannot import: see `_reduced`."""

    def _dynamic_function_reduce(self, func: FunctionType) -> Any:
        return _reduced(func, self._function_getnewargs(func))


def _reduced(func: FunctionType, arguments: tuple[Any, ...]) -> Any:
    """Return how pickle can make a function: code first, then what it refers to, maybe itself.

    Args:
        func: one that ranks cannot import.
        arguments: with which cloudpickle would make its shell: its code, its future globals, …

    """
    named = cloudpickle._extract_code_globals(func.__code__)
    used = {name: func.__globals__[name] for name in named if name in func.__globals__}
    inside = [cloudpickle._get_cell_contents(cell) for cell in func.__closure__ or ()]
    slots = {name: getattr(func, name) for name in _SLOTS}
    slots["__globals__"] = used
    slots["_cloudpickle_submodules"] = imported_submodules(func.__code__, [*used.values(), *inside])
    make, code = _maker(func.__code__)
    state = dict(func.__dict__), slots
    return make, (code, *arguments[1:]), state, None, None, cloudpickle._function_setstate


def imported_submodules(code: CodeType, reached: Iterable[Any]) -> list[ModuleType]:
    """Return the imported modules that `code` may reach by attributes of packages among `reached`.

    After ``import torch.nn.functional``, a function that says ``torch.nn.functional.relu`` needs
    that import on the ranks as well, where only ``torch`` might be there.
    """
    found = []
    packages = [x.__name__ for x in reached if isinstance(x, ModuleType) and x.__package__]
    while packages:
        package = packages.pop()
        there = [name for each in code.co_names if (name := f"{package}.{each}") in sys.modules]
        found += [sys.modules[name] for name in there]
        packages += there
    return found


def _maker(code: CodeType) -> tuple[Any, Any]:
    """Return what makes a function, and its code as it takes it: mostly in Python's own format.

    The ranks run the same Python, and that format takes a tenth of the time, here and there.
    """
    try:
        return _function, marshal.dumps(code)
    except ValueError:  # somebody has put other objects among its constants
        return cloudpickle._make_function, code


def _function(code: bytes, *rest: Any) -> Any:
    return cloudpickle._make_function(marshal.loads(code), *rest)
