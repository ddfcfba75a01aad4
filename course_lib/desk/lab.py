"""Open JupyterLab on the student's desk, with the settings of this course."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from jupyter_core.paths import jupyter_runtime_dir

SETTINGS = Path(__file__).resolve().parents[1] / "ranks" / "notebook" / "jupyterlab"
"""A Jupyter configuration folder. Closing a notebook ends its kernel, and with it the ranks.
There are no panels for instructors and no news."""


class NoHome(OSError):
    """JupyterLab cannot write its own files; the message says what to do."""


def open_lab(desk: Path, options: Sequence[str] = ()) -> NoReturn:
    """Replace this process by JupyterLab, with `options` for its command line.

    Raises:
        NoHome: it could not write its own files.

    """
    folder = Path(jupyter_runtime_dir())
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not os.access(folder, os.W_OK):
        raise NoHome(
            f"JupyterLab must write to {folder}, but has no permission. Give it another home "
            "folder: make lab HOME=/a/folder/of/yours. `course doctor` checks the rest"
        )
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={desk}"]
    command += ["--LabApp.default_url=/lab/tree/lectures", *options]
    os.execve(sys.executable, command, environment())


def environment() -> dict[str, str]:
    """Return this process's environment; the course's settings come before the user's."""
    before = os.environ.get("JUPYTER_CONFIG_PATH")
    paths = [str(SETTINGS), *([before] if before else [])]
    return {**os.environ, "JUPYTER_CONFIG_PATH": os.pathsep.join(paths)}
