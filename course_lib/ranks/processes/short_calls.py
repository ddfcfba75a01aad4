"""A call that is little more than code, as bytes: what most functions of a notebook are.

Pickle makes an object per message and looks up, here and there, every function that shall make the
parts: that is most of what an empty call costs. Where a function refers to nothing but modules and
plain values, `marshal` writes all there is to say in one go. Every other call goes by `packing`.
"""

from __future__ import annotations

import builtins
import marshal
import sys
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any

from cloudpickle import cloudpickle

from course_lib.ranks.processes.functions import imported_submodules

Call = tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]
"""A function and its arguments."""

_PLAIN = frozenset({type(None), bool, int, float, str})
"""Types of what `marshal` writes and what nobody can change or have a second reference to."""
_BUILT_IN = {kind: name for name, kind in vars(builtins).items() if type(kind) is type}
_OF_THE_CELL = ("__package__", "__name__", "__file__")
"""What every function finds among its globals, as cloudpickle has it."""


def short(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bytes | None:
    """Return the call as bytes for `read`, or None if it is more than code and plain values."""
    if type(fn) is not FunctionType or fn.__module__ != "__main__":
        return None  # what can be imported goes by its name
    if fn.__closure__ or fn.__dict__ or fn.__kwdefaults__:
        return None
    for value in (*args, *kwargs.values(), *(fn.__defaults__ or ())):
        if type(value) not in _PLAIN:
            return None
    values: dict[str, Any] = {}
    modules: dict[str, ModuleType] = {}
    there = fn.__globals__
    for name in cloudpickle._extract_code_globals(fn.__code__):
        if name not in there:
            continue
        value = there[name]
        if type(value) in _PLAIN:
            values[name] = value
        elif type(value) is ModuleType and _goes_by_name(value):
            modules[name] = value
        else:
            return None
    for name in _OF_THE_CELL:
        if name in there:
            values[name] = there[name]
    annotations = _written(fn.__annotations__)
    if annotations is None:
        return None
    below = imported_submodules(fn.__code__, modules.values()) if modules else ()
    call = (
        fn.__code__,
        values,
        {name: module.__name__ for name, module in modules.items()},
        [module.__name__ for module in below],
        (fn.__name__, fn.__qualname__, fn.__doc__, fn.__defaults__, annotations),
        (*args,),
        kwargs,
    )
    try:
        return marshal.dumps(call)
    except ValueError:  # somebody has put other objects among the constants of the code
        return None


def _goes_by_name(module: ModuleType) -> bool:
    """Return whether ranks import the module: most, but not one that stands in no file."""
    if sys.modules.get(module.__name__) is not module:
        return False
    return not cloudpickle._is_registered_pickle_by_value(module)


def _written(annotations: dict[str, Any]) -> dict[str, Any] | None:
    """Return annotations with the built-in types by name; None if there are others."""
    found: dict[str, Any] = {}
    for name, kind in annotations.items():
        if type(kind) in _PLAIN:
            found[name] = kind
        elif type(kind) is type and kind in _BUILT_IN:
            found[name] = (_BUILT_IN[kind],)
        else:
            return None
    return found


def read(data: bytes) -> Call:
    """Return the call that `short` has written: its function anew, with globals of its own."""
    code, values, modules, below, slots, args, kwargs = marshal.loads(data)
    for name in below:
        cloudpickle.subimport(name)
    for name, module in modules.items():
        values[name] = cloudpickle.subimport(module)
    name, qualname, doc, defaults, annotations = slots
    fn = cloudpickle._make_function(code, values, name, defaults, None)
    fn.__module__, fn.__qualname__, fn.__doc__ = "__main__", qualname, doc
    if annotations:
        fn.__annotations__ = {
            name: getattr(builtins, kind[0]) if type(kind) is tuple else kind
            for name, kind in annotations.items()
        }
    return fn, args, kwargs
