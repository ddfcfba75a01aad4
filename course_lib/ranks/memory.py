"""Memory that processes share without a name: nothing is left in the file system, ever."""

from __future__ import annotations

import os
import tempfile


def anonymous_file(name: str) -> int:
    """Return the descriptor of an empty file that is gone with its last descriptor and mapping."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:  # macOS
        return os.dup(file.fileno())


def path_of(fd: int) -> str | None:
    """Return a path under which this process can open the file of `fd` anew, if there is one."""
    path = f"/proc/self/fd/{fd}"  # opens the file itself, also when it has no name
    return path if os.path.exists(path) else None
