"""Refuse classes and functions of PyTorch that do what a task asks the student to write."""

from __future__ import annotations

from contextlib import ExitStack
from importlib import import_module
from types import FunctionType
from typing import Any, NoReturn
from unittest import mock

import torch

_SGD = vars(import_module("torch.optim.sgd")).items()
OPTIMIZERS: tuple[Any, ...] = (
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    *(member for name, member in _SGD if isinstance(member, FunctionType) and name.endswith("sgd")),
)
"""The parts of ``torch.optim`` that would take a step of SGD, or give its learning rate."""


def _refuse(*_: Any, **__: Any) -> NoReturn:
    # This code runs with the globals of the function that it replaces.
    import sys

    raise RuntimeError(
        f"{sys._getframe().f_code.co_name} cannot be used: it is what this task asks you to write"
    )


def refusing(*forbidden: type | FunctionType) -> ExitStack:
    """Return a context that refuses these classes and functions.

    Making an object of the classes, or calling the functions, raises RuntimeError. A function is
    refused under every name under which it was imported, because its code is replaced. If someone
    bypasses a class's ``__init__``, the object cannot be iterated over.
    """

    def refuse(self: Any, *_: Any, **__: Any) -> None:
        made_of = {target.__name__ for target in forbidden} & {
            parent.__name__ for parent in type(self).__mro__
        }
        name = type(self).__name__ if type(self).__module__.startswith("torch.") else min(made_of)
        raise RuntimeError(f"{name} cannot be used: it is what this task asks you to write")

    stack = ExitStack()
    for target in forbidden:
        if isinstance(target, FunctionType):
            stack.callback(setattr, target, "__code__", target.__code__)
            target.__code__ = _refuse.__code__.replace(co_name=target.__name__)
        else:
            for name in {"__init__", "__iter__"} & {"__init__", *vars(target)}:
                stack.enter_context(mock.patch.object(target, name, refuse))
    return stack
