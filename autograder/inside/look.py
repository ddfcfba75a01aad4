"""Test from inside a cell whether a student process can read all files that it needs.

If the cell's user may not read a file, a student's import fails. That would look like the student's
mistake.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from autograder.inside.scratch import is_own
from course_lib.ranks.wire import send

_ENOUGH = 3


def serve(fds: list[int], config: dict[str, Any]) -> None:
    """Send a sentence on the first paths that cannot be read, or an empty text."""
    # A module may have made files in the sandbox's `HOME`, as torch 2.8 does; cells have their own.
    hidden = sorted(path for path in {*_needed()} if not (is_own(path) or _readable(path)))
    problem = ""
    if hidden:
        problem = (
            f"The sandbox's user may not read these files: {', '.join(hidden[:_ENOUGH])}. Run "
            "chmod -R o+rX on the course's folder, its virtual environment and its Python."
        )
    with socket.socket(fileno=fds[0]) as channel:
        send(channel, problem)


def _needed() -> Iterator[str]:
    """Yield the files of all loaded modules, and all entries of the search path."""
    yield from (sys.executable, sys.prefix, sys.base_prefix, *sys.path)
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and os.path.isabs(file):
            yield file
    for folder in filter(os.path.isdir, sys.path):
        with suppress(PermissionError):  # the folder itself is reported
            yield from (entry.path for entry in os.scandir(folder))


def _readable(path: str) -> bool:
    """Return whether a path can be read; a link that leads nowhere does not matter."""
    if os.path.islink(path) and not os.path.exists(path):
        return True
    if path.endswith(".zip") and not os.path.lexists(path):
        return True  # the standard library's zip is on every search path, but few machines have it
    return os.access(path, os.R_OK | os.X_OK if os.path.isdir(path) else os.R_OK)
