"""Classes and functions of PyTorch that do what a task asks for: whoever uses one is told so."""

from __future__ import annotations

from contextlib import ExitStack
from types import FunctionType
from typing import Any, NoReturn
from unittest import mock


def _refuse(*_: Any, **__: Any) -> NoReturn:
    # It runs among the globals of the function that it stands in for.
    import sys

    raise RuntimeError(f"{sys._getframe().f_code.co_name} is what this task asks you to write")


def refusing(*made: type | FunctionType) -> ExitStack:
    """Return a context in which these raise RuntimeError: classes when made, functions when called.

    A function is refused under whatever name someone has imported it: its code is replaced.
    """

    def refuse(self: Any, *_: Any, **__: Any) -> None:
        raise RuntimeError(f"{type(self).__name__} is what this task asks you to write")

    stack = ExitStack()
    for each in made:
        if isinstance(each, FunctionType):
            stack.callback(setattr, each, "__code__", each.__code__)
            each.__code__ = _refuse.__code__.replace(co_name=each.__name__)
        else:
            stack.enter_context(mock.patch.object(each, "__init__", refuse))
    return stack
