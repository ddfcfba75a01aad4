"""The pickler of ranks: cloudpickle's, but for exceptions, handles and the names of files.

An exception arrives as it was raised, whatever its ``__init__`` takes. Python's own way calls the
class with ``error.args``. That is the message alone where an ``__init__`` has taken something else,
and the call then fails. A handle does not travel, and a sentence says what to do instead.

Code keeps the name of its file, by which a report names a line; cloudpickle 3.1.3 leaves it out.
"""

from __future__ import annotations

import io
import pickle
import types
from collections import ChainMap
from typing import Any, ClassVar

import cloudpickle
import torch.distributed as dist


def _code(code: types.CodeType) -> tuple[Any, ...]:
    kind, args = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    filename = 10  # its place in the constructor of every Python since 3.8: see ``help(CodeType)``
    return kind, (*args[:filename], code.co_filename, *args[filename + 1 :])


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's, but no exception is made anew by a call of its class, and code has its file.

    Raises, besides what that one raises:
        TypeError: a handle of a communication was to be sent.

    """

    dispatch_table: ClassVar[Any] = ChainMap(
        {types.CodeType: _code}, cloudpickle.Pickler.dispatch_table
    )

    def reducer_override(self, obj: Any) -> Any:
        """Return how `obj` is made where it arrives: see `pickle.Pickler`."""
        if isinstance(obj, dist.Work):
            raise TypeError(
                f"the handle of an operation ({type(obj).__name__}) must stay on its rank: call "
                "wait() on it there, and return the tensor"
            )
        if not isinstance(obj, BaseException):
            return super().reducer_override(obj)
        kind, base = type(obj), _built_in(type(obj))
        if kind is base or kind.__reduce__ is not base.__reduce__:
            return NotImplemented  # its ``__init__`` is Python's, or it says itself how it travels
        reduced: Any = obj.__reduce__()
        _, args, *state = reduced
        return _made_anew, (kind, args), *state


def _built_in(kind: type[BaseException]) -> Any:
    """Return the class of Python itself that a class of exceptions descends from."""
    return next(each for each in kind.__mro__ if each.__module__ == "builtins")


def _made_anew(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    base = _built_in(kind)
    error: BaseException = base.__new__(kind, *args)
    base.__init__(error, *args)  # which keeps more than the arguments, as an OSError its number
    return error


def dumps(value: Any) -> bytes:
    """Return `value` as bytes for ``pickle.loads``; raise whatever pickling raises."""
    file = io.BytesIO()
    Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()
