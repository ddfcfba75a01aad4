"""Questions to a person, such as ``input()`` or a debugger: on a rank, nobody can answer them."""

from __future__ import annotations

import bdb
import builtins
from typing import Any, NoReturn


def refuse_questions() -> None:
    """Raise an error in this process where Python would ask a person, or start a debugger."""
    builtins.input = _refuse
    bdb.Bdb.set_trace = _refuse  # type: ignore[method-assign]


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise EOFError(
        "nobody can answer on a rank. Give it what it asks for as an argument; instead of "
        "a debugger, use print, or call the function in a cell without ranks"
    )
