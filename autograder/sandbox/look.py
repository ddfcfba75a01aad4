"""Test that a cell of the sandbox has everything that it needs, before anything is graded.

A sandbox may start even if cells fail, or if a cell's user may not read Python, its packages or
the course. If this were noticed later, it would look like a student's mistake.
"""

from __future__ import annotations

import socket
from typing import Any

from autograder.sandbox.place import MachineFailure, SandboxedPlace
from autograder.sandbox.unavailable import SandboxUnavailable
from course_lib.ranks.wire import receive

_SECONDS = 120.0


def ready(sandbox: SandboxedPlace) -> None:
    """Start the sandbox, and test from inside a cell that everything needed is there.

    Raises:
        SandboxUnavailable: nothing can be graded here; the message says why, and what to do.

    """
    try:
        sandbox.warm()
        seen = _look_from_a_cell(sandbox)
    except (MachineFailure, OSError) as error:
        raise SandboxUnavailable(_short(str(error)), advice="") from None
    if hidden := seen.get("hidden"):
        raise SandboxUnavailable(
            f"The sandbox's user may not read these files: {', '.join(map(str, hidden))}. "
            f"Run chmod -R o+rX on the course's folder, its virtual environment and its Python.",
            advice="",
        )
    if wrong := seen.get("home"):
        raise SandboxUnavailable(f"Nothing can be written in the sandbox: {wrong}", advice="")


def _look_from_a_cell(sandbox: SandboxedPlace) -> dict[str, Any]:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            cell = sandbox.cell("autograder.inside.look:serve", {}, [theirs.fileno()])
        with cell:
            ours.settimeout(_SECONDS)
            try:
                return dict(receive(ours))  # trusted, because no student code has run here
            except (OSError, ValueError, EOFError):
                raise sandbox.broken("A cell of the sandbox did not start") from None


def _short(text: str) -> str:
    """Return the first line and the last line, which has the exception's own message."""
    first, *rest = text.splitlines() or [""]
    return " … ".join([first, *rest[-1:]])
