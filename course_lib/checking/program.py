"""A check's program as bytes: what the ranks are given to run, and nothing else of the check.

The function travels with the names that it uses, and without its file, so that where a student's
code runs there is no judge and no oracle to ask.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cloudpickle

from course_lib.ranks.explain.pickling import dumps

_OURS = "course_lib.checking."
_THERE = f"{_OURS}on_ranks"
"""The rank's side, which is where the program arrives: all of it is there, and nothing else."""


def pack_program(program: Callable[..., Any]) -> bytes:
    """Return the program as bytes, with what it uses of its assignment's files and of `checking`.

    They run code where they are read: on ranks, never where a grade is decided.
    """
    theirs = getattr(program, "program", program).__module__  # of a task: the author's program
    ours = {name for name in sys.modules if name.startswith(_OURS)}
    by_value = {name for name in ours if not name.startswith(_THERE)} | {theirs}
    by_value -= cloudpickle.list_registry_pickle_by_value()
    modules = [sys.modules[name] for name in by_value if name in sys.modules]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        return dumps(program)
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)
