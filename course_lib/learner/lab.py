"""Bring your copies of lectures and assignments up to date and open JupyterLab on them.

Your changes stay, and new versions are put beside them. All options except --desk go to JupyterLab,
for example --no-browser or --port=9000.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from jupyter_core.paths import jupyter_config_dir

from course_lib.installed import find_course
from course_lib.learner import CannotGoOn
from course_lib.learner._desk import refresh
from course_lib.learner.notebooks import has_outputs
from course_lib.learner.start import add_desk, desk_of

PASSES_ON = True  # options that it does not know, to JupyterLab
SETTINGS = Path(__file__).resolve().parents[1] / "ranks" / "notebook" / "jupyterlab"
"""A Jupyter configuration folder. Closing a notebook ends its kernel, and with it the ranks.
There are no panels for instructors and no news; ``custom`` dims figures on dark pages."""
FIRST = "lectures/00_start_here.ipynb"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_desk(parser)


def run(arguments: argparse.Namespace) -> int:
    """Replace this process by JupyterLab."""
    course = find_course()
    desk = desk_of(arguments, course)
    if not (course / "lectures").is_dir():
        raise CannotGoOn(
            f"there are no lectures in {course}. In the folder that you cloned, run: "
            "pip install -e ."
        )
    for note in refresh(course, desk):
        print(f"course lab: {note}", flush=True)
    open_lab(desk, arguments.more)


def open_lab(desk: Path, options: Sequence[str] = ()) -> NoReturn:
    """Replace this process by JupyterLab, with `options` for its command line."""
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={desk}"]
    command += [f"--LabApp.default_url=/lab/tree/{opened(desk)}", *style()]
    # Not a login shell, which on many machines sets PATH anew and would not find `course`.
    shell = {"shell_command": [os.environ.get("SHELL", "sh")]}
    command += [f"--ServerApp.terminado_settings={shell!r}", *options]
    os.execve(sys.executable, command, environment())


def opened(desk: Path) -> str:
    """Return what JupyterLab shows: lecture 00 until it has been run, then the lectures' folder.

    JupyterLab also reopens what was open when it was closed.
    """
    first = desk / FIRST
    is_begun = not first.is_file() or has_outputs(FIRST, first.read_bytes())
    return "lectures" if is_begun else FIRST


def style() -> list[str]:
    """Return the options that let JupyterLab use our style sheet, or the user's own one."""
    folders = [str(folder / "custom") for folder in (Path(jupyter_config_dir()), SETTINGS)]
    searched = {"static_custom_path": folders}
    return ["--LabApp.custom_css=True", f"--ServerApp.tornado_settings={searched!r}"]


def environment() -> dict[str, str]:
    """Return this process's environment; the course's settings and commands come before the user's.

    So `course` is found in a terminal of JupyterLab, and after ``!`` in a cell, also where nobody
    activated ``.venv``.
    """
    first = {"JUPYTER_CONFIG_PATH": str(SETTINGS), "PATH": str(Path(sys.executable).parent)}
    return os.environ | {
        name: os.pathsep.join(filter(None, [path, os.environ.get(name)]))
        for name, path in first.items()
    }
