"""JupyterLab for students: opened on the desk, with the settings of this course."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

SETTINGS = Path(__file__).resolve().parents[1] / "ranks" / "notebook" / "jupyterlab"
"""A Jupyter configuration folder: closing a notebook ends its kernel, and with it the ranks; no
panels for instructors; no news."""


def open_lab(desk: Path, options: Sequence[str] = ()) -> NoReturn:
    """Become JupyterLab, with `options` of its own command line."""
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={desk}"]
    command += ["--LabApp.default_url=/lab/tree/lectures", *options]
    os.execve(sys.executable, command, environment())


def environment() -> dict[str, str]:
    """Return this process's environment with the course's settings in front of the user's."""
    before = os.environ.get("JUPYTER_CONFIG_PATH")
    paths = [str(SETTINGS), *([before] if before else [])]
    return {**os.environ, "JUPYTER_CONFIG_PATH": os.pathsep.join(paths)}
