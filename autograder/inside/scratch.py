"""The two folders that each cell has for itself, ``/tmp`` and ``/dev/shm``.

The course, its virtual environment or Python may lie below one of them on this machine. The sandbox
shows them there, read only. A cell's own folders would hide them, so they are bound in again. The
cell then sees at those places what the sandbox shows, and nothing else of this machine.

This file needs Linux and the standard library only.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from pathlib import Path
from typing import Any

HOME = "/tmp"
"""The student's folder: the working directory, and the files below it that `is_own` accepts."""
_SHARED_MEMORY = "/dev/shm"

_NOSUID, _NODEV, _BIND, _REC = 2, 4, 0x1000, 0x4000

_libc = ctypes.CDLL(None, use_errno=True)


def mount(
    source: bytes, target: bytes, kind: bytes | None, flags: int, options: bytes | None
) -> None:
    """Mount something; the arguments are those of the system call.

    Raises:
        OSError: the kernel refuses.

    """
    if _libc.mount(source, target, kind, flags, options) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount on {os.fsdecode(target)}: {os.strerror(number)}")


def mount_own(config: dict[str, Any]) -> None:
    """Mount a cell's own folders, of ``config["tmp"]`` and ``config["shm"]`` bytes."""
    held = [(path, os.open(path, os.O_PATH | os.O_CLOEXEC)) for path in of_python()]
    for folder, size in ((HOME, config["tmp"]), (_SHARED_MEMORY, config["shm"])):
        options = f"mode=1777,size={size},nr_inodes=20000".encode()
        mount(b"tmpfs", folder.encode(), b"tmpfs", _NOSUID | _NODEV, options)
    mask = os.umask(0o022)
    for path, descriptor in held:
        os.makedirs(path if os.path.isdir(descriptor) else os.path.dirname(path))
        if not os.path.isdir(descriptor):
            Path(path).touch()
        # Recursively, with the mounts below it; each mount stays as it is, read only.
        mount(f"/proc/self/fd/{descriptor}".encode(), os.fsencode(path), None, _BIND | _REC, None)
        os.close(descriptor)
    os.umask(mask)


@functools.cache
def of_python() -> tuple[str, ...]:
    """Return the paths below a cell's own folders at which the sandbox shows something.

    Each process asks before it mounts the folders, and remembers the answer.
    """
    found: list[str] = []
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        # The kernel writes spaces, tabs, line ends and backslashes as numbers, see proc(5).
        name = re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), line.split()[4])
        path = os.fsdecode(name)
        if path.startswith((f"{HOME}/", f"{_SHARED_MEMORY}/")):
            found.append(path)
    return tuple(path for path in sorted({*found}) if not _below(os.path.dirname(path), found))


def is_own(path: str) -> bool:
    """Return whether a notebook has written the file at `path`, or may have."""
    return path.startswith(f"{HOME}/") and not _below(path, of_python())


def _below(path: str, folders: list[str] | tuple[str, ...]) -> bool:
    """Return whether `path` is one of these folders, or lies in one."""
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)
