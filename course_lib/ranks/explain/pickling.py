"""The pickler of ranks: cloudpickle's, except for exceptions, handles and the names of files.

An exception arrives as it was raised, for any signature of its ``__init__``. Python's own way calls
the class with ``error.args``. These are only the message if ``__init__`` took something else, and
the call then fails. A handle cannot be sent; the error message says what to do instead.

Code keeps the name of its file, as a report needs it to name a line. cloudpickle 3.1.3 drops it.
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
    filename = 10  # its index among the constructor's arguments since 3.8: see ``help(CodeType)``
    return kind, (*args[:filename], code.co_filename, *args[filename + 1 :])


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's pickler, with other rules for exceptions, handles and code: see the module.

    Raises, in addition to what cloudpickle's pickler raises:
        TypeError: the object contains the handle of a communication.

    """

    dispatch_table: ClassVar[Any] = ChainMap(
        {types.CodeType: _code}, cloudpickle.Pickler.dispatch_table
    )

    def reducer_override(self, obj: Any) -> Any:
        """Return how `obj` is rebuilt by its reader: see `pickle.Pickler`."""
        if isinstance(obj, dist.Work):
            raise TypeError(
                f"the handle of an operation ({type(obj).__name__}) must stay on its rank: call "
                "wait() on it there, and return the tensor"
            )
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
    return next(each for each in kind.__mro__ if each.__module__ == "builtins")


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
