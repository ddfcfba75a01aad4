"""The private folders of each cell, ``/tmp`` and ``/dev/shm``, and its view of ``/proc``.

On this machine, the course, its virtual environment or Python may be below one of these folders.
The sandbox shows them at their usual paths, read only. A cell's own folders would hide them, so
they are mounted again. At those paths, the cell then sees what the sandbox shows, and nothing else
of this machine.

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
"""The student's working directory. The student's files are those below it that `is_own` accepts."""
_SHARED_MEMORY = "/dev/shm"

_RDONLY, _NOSUID, _NODEV, _REMOUNT, _BIND, _REC = 1, 2, 4, 0x20, 0x1000, 0x4000
_STILL = "/tmp/.proc"
"""Where the sandbox has what cells see in ``/proc`` besides processes. Cells do not see this."""
_KEPT = ("cpuinfo", "meminfo", "stat", "uptime", "version", "filesystems")
"""Files of ``/proc`` that programs read. Cells see a copy from the start of the sandbox."""

_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> None:
    """Call a function of the C library.

    Raises:
        OSError: the kernel refuses.

    """
    if getattr(_libc, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{arguments}: {os.strerror(number)}")


mount = functools.partial(call, "mount")


def mount_own(config: dict[str, Any]) -> None:
    """Mount a cell's private folders, of ``config["tmp"]`` and ``config["shm"]`` bytes."""
    held = [(path, os.open(path, os.O_PATH | os.O_CLOEXEC)) for path in of_python()]
    for folder, size in ((HOME, config["tmp"]), (_SHARED_MEMORY, config["shm"])):
        options = f"mode=1777,size={size},nr_inodes=20000".encode()
        mount(b"tmpfs", folder.encode(), b"tmpfs", _NOSUID | _NODEV, options)
    mask = os.umask(0o022)
    for path, descriptor in held:
        os.makedirs(path if os.path.isdir(descriptor) else os.path.dirname(path))
        if not os.path.isdir(descriptor):
            Path(path).touch()
        # Mount it recursively, with the mounts below it; each mount stays read only.
        mount(f"/proc/self/fd/{descriptor}".encode(), os.fsencode(path), None, _BIND | _REC, None)
        os.close(descriptor)
    os.umask(mask)


def keep_still() -> None:
    """Copy what ``/proc`` says of the machine; the copies never change.

    What the kernel says of the whole machine changes with the work of every cell. So it would
    carry messages from cell to cell.
    """
    os.mkdir(_STILL)
    mount(b"tmpfs", _STILL.encode(), b"tmpfs", _NOSUID | _NODEV, b"mode=755,size=4m")
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() or entry.is_symlink():
            continue
        still = Path(_STILL, entry.name)
        if entry.is_dir():
            still.mkdir(0o555)
        else:
            still.write_bytes(Path(entry.path).read_bytes() if entry.name in _KEPT else b"")
            still.chmod(0o444)
    mount(b"tmpfs", _STILL.encode(), None, _REMOUNT | _RDONLY | _NOSUID | _NODEV, b"size=4m")


def hide_machine() -> None:
    """Show the copies of `keep_still` in place of all that is no process in a new ``/proc``."""
    for entry in os.scandir(_STILL):
        mount(entry.path.encode(), f"/proc/{entry.name}".encode(), None, _BIND, None)


@functools.cache
def of_python() -> tuple[str, ...]:
    """Return the paths below a cell's private folders at which the sandbox shows something.

    Each process calls this before it mounts the folders; the result is cached.
    """
    paths: list[str] = []
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        # The kernel writes spaces, tabs, line ends and backslashes as octal numbers, see proc(5).
        name = re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), line.split()[4])
        path = os.fsdecode(name)
        if path.startswith((f"{HOME}/", f"{_SHARED_MEMORY}/")) and path != _STILL:
            paths.append(path)
    return tuple(path for path in sorted({*paths}) if not _below(os.path.dirname(path), paths))


def is_own(path: str) -> bool:
    """Return whether the file at `path` may have been written by the notebook."""
    return path.startswith(f"{HOME}/") and not _below(path, of_python())


def _below(path: str, folders: list[str] | tuple[str, ...]) -> bool:
    """Return whether `path` is one of these folders, or is inside one."""
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)
