"""Pack a check's program as bytes for the ranks, without the other parts of the check.

The function is sent with the names that it uses, but without its file. So a student's code finds no
judge and no oracle where it runs.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle

from course_lib.ranks.explain.pickling import dumps

_OURS = "course_lib.checking."
_THERE = f"{_OURS}on_ranks"
"""The part of `checking` that is on the ranks: all of it is there, and no other part is."""


def pack_program(program: Callable[..., Any]) -> bytes:
    """Return the program as bytes, with everything that it uses of its assignment and `checking`.

    Reading these bytes runs code. They are read on ranks, never where a grade is decided.
    """
    own = getattr(program, "program", program)  # in a task, the author's program
    parts = inspect.getclosurevars(own).nonlocals.values() if inspect.isfunction(own) else ()
    theirs = {own.__module__} | {part.__module__ for part in parts if inspect.isfunction(part)}
    ours = {name for name in sys.modules if name.startswith(_OURS)}
    by_value = {name for name in ours if not name.startswith(_THERE)} | theirs
    by_value -= cloudpickle.list_registry_pickle_by_value()
    modules = [sys.modules[name] for name in by_value if name in sys.modules]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        return dumps(program)
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)
