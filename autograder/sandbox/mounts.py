"""The files that a sandbox can see: the system's programs, Python, and this course."""

import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

import course_lib
from autograder.errors import SandboxUnavailable

_SHARED = ("/tmp", "/dev/shm", "/var/tmp", "/home", "/root")
_PACKAGES = ("torch", "numpy", "cloudpickle", "IPython")
"""Packages, in addition to the course, that the sandbox needs from its start."""
_COURSE_FILES = "share/sgd-to-ddp"
"""The folder in the environment to which a wheel writes assignments and their solutions."""


@dataclass(frozen=True)
class Mount:
    """The sandbox's view at the path ``target``, which is read only.

    It shows the file or directory ``source``, or a file with ``text``, or else an empty directory
    for further mounts. A ``device`` may be used as a device.
    """

    target: str | Path
    source: str | Path | None = None
    text: str | None = None
    device: bool = False


def python_mounts(masked: Sequence[str] = (), extra: Sequence[Mount] = ()) -> list[Mount]:
    """Return the mounts that this Python, its packages and ``course_lib`` need, then ``extra``.

    If an editable install points to a directory, only its package ``course_lib`` is visible: no
    assignment, no hidden case, no gradebook. If the course comes from a wheel, the files next to
    its packages, such as solutions, are not visible either.

    Args:
        masked: modules of ``course_lib``, such as ``"course_lib.sharding"``, that raise
            ImportError when imported. No compiled copy of them is visible either.
        extra: additional mounts.

    Raises:
        ValueError: there is no such module to mask.
        SandboxUnavailable: Python or the course is at a path that cannot be shown.
    """
    prefixes = {Path(p) for p in (sys.prefix, sys.exec_prefix, sys.base_prefix)}
    prefixes |= {prefix.resolve() for prefix in prefixes}  # bin/python may link from one to another
    package = course_package()
    _make_sure_of_paths(prefixes, package)
    mounts = [Mount(p, p) for p in sorted(prefixes) if p not in (Path("/"), Path("/usr"))]
    installed = {p / _COURSE_FILES for p in (*prefixes, Path(sysconfig.get_path("data")))}
    mounts += [Mount(p) for p in sorted(installed) if p.is_dir()]  # shown as empty
    if beside_packages(package):
        # Hide it explicitly, because it may be inside a folder that is mounted above, such as /usr.
        mounts.append(Mount(package.parent))
    for name in masked:
        path = package.parent.joinpath(*name.split("."))
        if package not in path.parents or not (path.is_dir() or path.with_suffix(".py").is_file()):
            raise ValueError(
                f"MASKED in hidden.py names {name!r}, but course_lib has no such module: correct "
                "the name"
            )
    return [*mounts, *_package(package, "course_lib", masked), *extra]


def _make_sure_of_paths(prefixes: set[Path], package: Path) -> None:
    """Make sure that a sandbox can show Python and the course, and nothing else.

    Raises:
        SandboxUnavailable: this is not possible.

    """
    for prefix in prefixes:
        shared = [folder for folder in _SHARED if Path(folder).is_relative_to(prefix)]
        if prefix not in (Path("/"), Path("/usr")) and shared:
            raise SandboxUnavailable(
                f"This Python's folder is {prefix}, and other people's files are in {shared[0]}: "
                "student code would see these. Make a virtual environment in a folder of its own."
            )
        if beside_packages(package) and prefix == package.parent:
            raise SandboxUnavailable(
                f"The virtual environment and the course are one folder, {prefix}: student code "
                "would see the hidden cases. Make a virtual environment in a folder of its own."
            )
    shown = [*prefixes, Path("/usr")]
    for name in _PACKAGES:
        spec = PathFinder.find_spec(name)
        lies = Path(spec.origin).absolute() if spec is not None and spec.origin else None
        if lies is not None and not any(lies.is_relative_to(folder) for folder in shown):
            raise SandboxUnavailable(
                f"The package {name} is in {lies.parents[1]}, but the sandbox shows only packages "
                f"in {sys.prefix}. Install the course in a virtual environment, with pip."
            )
    if beside_packages(package) and os.pathsep in str(package):
        raise SandboxUnavailable(
            f"The path of the course's folder contains a {os.pathsep!r}, which separates folders "
            f"in Python's search path: {package.parent}. Move or rename that folder."
        )


def course_package() -> Path:
    """Return the folder of the package ``course_lib``."""
    return Path(course_lib.__file__).parent


def beside_packages(package: Path) -> bool:
    """Tell whether a package is in a clone instead of pip's folder of packages."""
    return package.parent not in {Path(sysconfig.get_path(key)) for key in ("purelib", "platlib")}


def _package(directory: Path, package: str, masked: Sequence[str]) -> Iterator[Mount]:
    """Mount the package in ``directory``, entry by entry if it contains a masked module.

    A mask over a single file would not be enough: it would vanish when an editor replaces that file
    outside, and ``__pycache__`` has copies.
    """
    if not any(name.startswith(f"{package}.") for name in masked):
        yield Mount(directory, directory)
        return
    yield Mount(directory)
    for entry in sorted(directory.iterdir()):
        name = f"{package}.{entry.name.partition('.')[0]}"
        if name in masked or entry.name == "__pycache__" or entry.name.startswith("."):
            continue
        yield from _package(entry, name, masked) if entry.is_dir() else [Mount(entry, entry)]
    for name in masked:
        parent, _, module = name.rpartition(".")
        if parent == package:
            message = f"this assignment asks you to write {name}, so it is not available"
            code = f"raise ImportError({message + ' while grading'!r}, name={name!r})\n"
            yield Mount(directory / f"{module}.py", text=code)


def tree(mounts: Sequence[Mount], tmp: int, file_of: Callable[[str | bytes], int]) -> list[str]:
    """Return bubblewrap's arguments for all that is visible: the system's programs, and the mounts.

    Args:
        mounts: the mounts, in any order.
        tmp: size of ``/tmp`` in bytes; ``/dev/shm`` gets the same size.
        file_of: puts a text in an open file and returns its descriptor.
    """
    arguments = []
    for path in ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"):
        if os.path.islink(path):
            arguments += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            arguments += ["--ro-bind", path, path]
    arguments += ["--proc", "/proc", "--dev", "/dev"]
    for path in ("/tmp", "/dev/shm"):
        arguments += ["--perms", "1777", "--size", str(tmp), "--tmpfs", path]
    for path in ("/etc/ld.so.cache", "/etc/alternatives", "/sys/devices/system/cpu"):
        arguments += [*_parents(path), "--ro-bind-try", path, path]
    read_only = ["/dev"]
    # Parents come first, so that no later mount hides an earlier one.
    for mount in sorted(mounts, key=lambda mount: len(Path(mount.target).parts)):
        target = str(mount.target)
        arguments += _parents(target)
        if mount.text is not None:
            fd = file_of(mount.text)
            arguments += ["--perms", "0444", "--ro-bind-data", str(fd), target]
        elif mount.source is not None:
            option = "--dev-bind" if mount.device else "--ro-bind"
            arguments += [option, str(mount.source), target]
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
