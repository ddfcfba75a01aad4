"""The pickler of ranks: cloudpickle's, which here also sends exceptions and more of ``functools``.

An exception arrives as it was raised, for any signature of its ``__init__``. Python's own way calls
the class with ``error.args``. These are only the message if ``__init__`` took something else, and
the call then fails. A function with ``@lru_cache`` arrives with an empty cache. The handle of an
operation cannot be sent; the error says what to do instead. A function of ``torch.compile`` is sent
uncompiled, and compiled anew on the rank, in the same way.

Code keeps the name of its file, as a report needs it to name a line. cloudpickle 3.1.3 drops it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import io
import pickle
import sys
import types
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, ClassVar

import cloudpickle
import torch.distributed as dist

_Cached = type(functools.lru_cache(len))


def _code(code: types.CodeType) -> tuple[Any, ...]:
    kind, args = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    filename = 10  # its index among the constructor's arguments since 3.8: see ``help(CodeType)``
    return kind, (*args[:filename], code.co_filename, *args[filename + 1 :])


def _cached(cached: Any) -> Any:
    """Reduce a function with ``@lru_cache``, of which Python would send only the name."""
    module = sys.modules.get(cached.__module__)
    if (
        cached.__module__ not in ("__main__", *cloudpickle.list_registry_pickle_by_value())
        and functools.reduce(
            lambda owner, name: getattr(owner, name, None), cached.__qualname__.split("."), module
        )
        is cached
    ):
        return NotImplemented
    return _cache_anew, (cached.__wrapped__, cached.cache_parameters())


def _cache_anew(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _compiled_anew(compiler: Callable[[Any], Any], function: Any) -> Any:
    return compiler(function)


def _cached_property(prop: functools.cached_property[Any]) -> Any:
    return functools.cached_property, (prop.func,), {"attrname": prop.attrname}  # without its lock


def _weak_keys(keys: weakref.WeakKeyDictionary[Any, Any]) -> Any:
    return weakref.WeakKeyDictionary, (dict(keys),)  # ``@singledispatch`` has one


def _proxy(proxy: types.MappingProxyType[Any, Any]) -> Any:
    return types.MappingProxyType, (dict(proxy),)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's pickler, with other rules for exceptions, handles and code: see the module.

    Raises, in addition to what cloudpickle's pickler raises:
        TypeError: the object contains the handle of a communication.

    """

    dispatch_table: ClassVar[Any] = ChainMap(
        {
            types.CodeType: _code,
            types.MappingProxyType: _proxy,
            functools.cached_property: _cached_property,
            weakref.WeakKeyDictionary: _weak_keys,
        },
        cloudpickle.Pickler.dispatch_table,
    )

    def reducer_override(self, obj: Any) -> Any:
        """Return how `obj` is rebuilt by its reader: see `pickle.Pickler`."""
        if isinstance(obj, dist.Work):
            raise TypeError(
                f"the handle of an operation ({type(obj).__name__}) must stay on its rank: call "
                "wait() on it there, and return the tensor"
            )
        if isinstance(obj, _Cached):
            return _cached(obj)
        if type(obj).__module__ == "IPython.core.autocall":  # a notebook's exit() would end it
            return getattr, (sys, "exit")
        if isinstance(obj, types.FunctionType) and hasattr(obj, "_torchdynamo_orig_callable"):
            compiler = inspect.getclosurevars(obj).nonlocals["self"]
            return _compiled_anew, (compiler, obj._torchdynamo_orig_callable)
        if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType:
            return importlib.import_module, (obj.__name__,)  # such as torch.backends.cudnn
        if not isinstance(obj, BaseException):
            return super().reducer_override(obj)
        kind, base = type(obj), _built_in(type(obj))
        if kind is base or kind.__reduce__ is not base.__reduce__:
            return NotImplemented  # a class of Python's own, or one with its own ``__reduce__``
        reduced: Any = obj.__reduce__()
        _, args, *state = reduced
        return _made_anew, (kind, args), *state


def _built_in(kind: type[BaseException]) -> Any:
    """Return the built-in class that an exception class derives from."""
    return next(base for base in kind.__mro__ if base.__module__ == "builtins")


def _made_anew(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    base = _built_in(kind)
    error: BaseException = base.__new__(kind, *args)
    base.__init__(error, *args)  # it sets further attributes, such as the errno of an OSError
    return error


def dumps(value: Any) -> bytes:
    """Return `value` as bytes for ``pickle.loads``. Exceptions of pickling pass through."""
    file = io.BytesIO()
    Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def unsendable_variable(function: Any) -> str:
    """Return the variable because of which a function cannot be sent; empty if none is found."""
    if isinstance(function, functools.partial):
        function = function.func
    for name, value in _variables_of(function):
        try:
            dumps(value)
        except Exception:
            return f"{name} ({type(value).__name__})"
    return ""


def _variables_of(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the variables that a Python function uses, by name."""
    if isinstance(function, types.FunctionType):
        for name in _names_in(function.__code__):
            if name in function.__globals__:
                yield name, function.__globals__[name]
        closure = function.__closure__ or ()
        for name, cell in zip(function.__code__.co_freevars, closure, strict=True):
            with suppress(ValueError):  # the variable has no value yet
                yield name, cell.cell_contents


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names that a function uses, also inside its lambdas and inner functions."""
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _names_in(const)
