"""Questions to a person, such as ``input()`` or a debugger: on a rank, nobody can answer them."""

from __future__ import annotations

import bdb
import io
import sys
from typing import Any, NoReturn


class _Nobody(io.TextIOBase):
    """Stands in for ``sys.stdin``."""

    def readable(self) -> bool:
        return True

    def readline(self, *_: Any) -> NoReturn:
        raise EOFError(
            "nobody can answer a rank: it has no keyboard. Give it the answer as an argument"
        )

    read = readline


def refuse_questions() -> None:
    """Raise an error in this process wherever Python would wait for a person's answer."""
    sys.stdin = _Nobody()
    before = bdb.Bdb.set_trace

    def set_trace(debugger: Any, *args: Any, **kwargs: Any) -> None:
        if getattr(debugger, "stdin", None) is sys.stdin:  # others ask through a socket
            raise RuntimeError(
                "nobody can answer a debugger on a rank: it has no keyboard. Print what you want "
                "to see, or call the function in a cell without ranks"
            )
        before(debugger, *args, **kwargs)

    bdb.Bdb.set_trace = set_trace  # type: ignore[assignment, method-assign]
