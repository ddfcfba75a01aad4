"""Where a rank stands when it says nothing: its stack, written by a signal handler in the rank.

``faulthandler`` writes it without the interpreter's help, so this also works while the rank is in
compiled code, or in a loop that swallows every exception.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from course_lib.ranks.explain.lines import innermost_function


def read_dump(fd: int, offset: int = 0) -> str:
    """Return what stands in a dump file from `offset` on."""
    size = min(os.fstat(fd).st_size - offset, 1 << 16)
    return os.pread(fd, size, offset).decode("utf-8", "replace") if size > 0 else ""


def wait_for_dump(fd: int, offset: int, until: float) -> str:
    """Return a dump that a signal has asked for; empty if it does not come in time."""
    text = ""
    while time.monotonic() < until:
        before, text = text, read_dump(fd, offset)
        if text and text == before:
            break
        time.sleep(0.005)
    return text


def stands_in_backward(dump: str) -> bool:
    """Return whether the innermost Python frame is autograd's call into its compiled engine."""
    return innermost_function(dump) == "_engine_run_backward"


def cpu_state(pid: int, whole_process: bool) -> tuple[str, int] | None:
    """Return (state, CPU ticks used) of a process's main thread, where the system tells."""
    path = f"/proc/{pid}/stat" if whole_process else f"/proc/{pid}/task/{pid}/stat"
    try:
        fields = Path(path).read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[11]) + int(fields[12])
