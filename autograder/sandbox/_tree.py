"""The files of a sandbox, as bubblewrap's arguments: the system's programs, and the mounts."""

import contextlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from autograder.sandbox.mounts import Mount


def prepare(mount: Mount, uid: int | None) -> None:
    """Make sure that user ``uid`` can use the mount; ``None`` means our own user.

    Raises:
        FileNotFoundError: the source does not exist.
        PermissionError: that user may not read it.
        ValueError: the target is not an absolute path.
    """
    if not Path(mount.target).is_absolute():
        raise ValueError(f"the mount's target {mount.target} is not an absolute path")
    if mount.source is None:
        return
    mode = os.stat(mount.source).st_mode
    if uid is None:
        return
    if mount.writable:
        os.chown(mount.source, uid, uid)
    elif not mode & stat.S_IROTH or (stat.S_ISDIR(mode) and not mode & stat.S_IXOTH):
        raise PermissionError(
            f"the sandbox's user may not read {mount.source}: run "
            f"chmod -R o+rX {str(mount.source)!r}"
        )


def programs(root: str) -> list[str]:
    """Return the arguments that show the system's programs and libraries below ``root``."""
    arguments = []
    for path in ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"):
        if os.path.islink(path):
            arguments += ["--symlink", os.readlink(path), root + path]
        elif os.path.isdir(path):
            arguments += ["--ro-bind", path, root + path]
    return arguments


def tree(
    root: str, mounts: Sequence[Mount], tmp: int, file_of: Callable[[str | bytes], int]
) -> list[str]:
    """Return the arguments for everything that is visible below ``root``.

    Args:
        root: the command's ``/``; empty if this is the mount namespace's own ``/``.
        mounts: the mounts, in any order.
        tmp: size of ``/tmp`` in bytes; ``/dev/shm`` gets the same size.
        file_of: puts a text in an open file and returns its descriptor.
    """
    arguments = [*_parents(f"{root}/usr"), *programs(root)]
    arguments += ["--proc", f"{root}/proc", "--dev", f"{root}/dev"]
    for path in ("/tmp", "/dev/shm"):
        arguments += ["--perms", "1777", "--size", str(tmp), "--tmpfs", root + path]
    for path in ("/etc/ld.so.cache", "/etc/alternatives", "/sys/devices/system/cpu"):
        arguments += [*_parents(root + path), "--ro-bind-try", path, root + path]
    read_only = [f"{root}/dev"]
    # Parents come first, so that no later mount hides an earlier one.
    for mount in sorted(mounts, key=lambda mount: len(Path(mount.target).parts)):
        target = f"{root}{mount.target}"
        arguments += _parents(target)
        if mount.text is not None:
            fd = file_of(mount.text)
            arguments += ["--perms", "0444", "--ro-bind-data", str(fd), target]
        elif mount.source is not None:
            how = "--dev-bind" if mount.device else "--bind" if mount.writable else "--ro-bind"
            arguments += [how, str(mount.source), target]
        else:
            arguments += ["--perms", "0755", "--tmpfs", target]
            read_only.append(target)
    return arguments + [part for path in (*read_only, "/") for part in ("--remount-ro", path)]


def _parents(target: str) -> list[str]:
    """Return the arguments that make missing directories above ``target``.

    Without them, bubblewrap 0.8 makes these directories for root only.
    """
    parents = reversed(Path(target).parents[:-1])
    return [part for path in parents for part in ("--perms", "0755", "--dir", str(path))]


@contextlib.contextmanager
def memory_file(content: str | bytes) -> Iterator[int]:
    """Make a file in memory, positioned at its start, and yield its descriptor."""
    with open(os.memfd_create("mount"), "w+b", buffering=0) as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.seek(0)
        yield file.fileno()
