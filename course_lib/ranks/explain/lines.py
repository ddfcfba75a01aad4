"""Find the line of the user's code that is running: without it, a report is of little use.

The innermost line usually belongs to PyTorch or to this package. A line in a cell of the notebook
says most. Second best is a line in a file that is neither installed nor part of Python.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType

import torch

_RANKS = Path(__file__).parents[1]
_COURSE = tuple(
    str(path) + os.sep
    for path in (_RANKS, _RANKS.with_name("checking"), _RANKS.with_name("capstone"))
)
TORCH = str(Path(torch.__file__).parent) + os.sep
"""PyTorch's folder."""
OURS = (*_COURSE, TORCH)
"""Folders whose lines are never the user's: all of `ranks`, the checks, the race, and PyTorch."""
_HANDED_OUT = re.compile(r".*[/\\]\d\d_\w+[/\\](checks|judges|\w+_judges)\.py")
"""Files of an assignment whose lines are not the user's either: its checks and judges."""
_PATHS = sysconfig.get_paths()
_INSTALLED = (
    *OURS,
    *(_PATHS[key] + os.sep for key in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<frozen",
)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (\S+)', re.MULTILINE)


def named(name: str, line: int | None, labels: Mapping[str, str]) -> str:
    """Return for example ``Cell In[3], line 7``. `labels`: file name → its name for people."""
    return f"{labels.get(name) or _basename(name)}, line {line}"


_basename = functools.lru_cache(maxsize=4096)(os.path.basename)


def innermost(
    frames: Iterable[tuple[str, int | None]], labels: Mapping[str, str]
) -> tuple[str, int | None] | None:
    """Return the innermost of `frames` that is the user's own. The innermost frame comes first.

    A frame of a cell is preferred. Next is a file that is neither installed nor part of Python,
    then a file that is part of neither this package nor PyTorch. Without any, return ``None``.
    """
    own = installed = None
    for name, line in frames:
        if name in labels:
            return name, line
        if own is None and not is_installed(name):
            own = name, line
        if installed is None and not _is_no_package(name):
            installed = name, line
    return own or installed


_OWN = 2


@functools.lru_cache(maxsize=4096)
def _rank_of(name: str) -> int:
    """Return how useful a file that is not a cell is: `_OWN`, 1 if installed, 0 if it is ours."""
    if not is_installed(name):
        return _OWN
    return 0 if _is_no_package(name) else 1


def _is_no_package(name: str) -> bool:
    return is_ours(name) or name.startswith((TORCH, "<frozen"))


def locator(labels: Mapping[str, str]) -> Callable[[], str]:
    """Return a function that names the innermost line of the user's code that is running."""

    def locate() -> str:
        # The same as `innermost`, but it gets the line number, which takes time, of one frame only.
        frame: FrameType | None = sys._getframe(1)
        best, best_rank = None, 0
        while frame is not None:
            name = frame.f_code.co_filename
            if name in labels:  # a cell, the usual case in a notebook: no outer frame says more
                return named(name, frame.f_lineno, labels)
            rank = _rank_of(name)
            if rank > best_rank:
                best, best_rank = frame, rank
                if rank == _OWN and not labels:
                    break  # without labels, no outer frame can be a cell
            frame = frame.f_back
        return named(best.f_code.co_filename, best.f_lineno, labels) if best else ""

    return locate


def line_of_thread(thread: int | None, labels: Mapping[str, str]) -> str:
    """Return the innermost line of the user's code that a thread of this process is running."""
    frame = sys._current_frames().get(thread or 0)
    frames = []
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    found = innermost(frames, labels)
    return named(*found, labels) if found else ""


def line_in_dump(dump: str, labels: Mapping[str, str]) -> str:
    """Return the innermost line of the user's code in a dump of ``faulthandler``, or ``""``."""
    found = innermost(((name, int(line)) for name, line, _ in _FRAME.findall(dump)), labels)
    return named(*found, labels) if found else ""


def innermost_function(dump: str) -> str:
    """Return the name of the innermost Python function in a dump of ``faulthandler``."""
    frames = _FRAME.findall(dump)
    return frames[0][2] if frames else ""


def is_installed(name: str) -> bool:
    """Return whether a file belongs to Python, to an installed package or to this package."""
    return name.startswith(_INSTALLED) or is_ours(name)


def package_of(name: str) -> str:
    """Return the installed package that a file belongs to, such as ``torch``, or ``Python``."""
    for key in ("purelib", "platlib"):
        if name.startswith(_PATHS[key] + os.sep):
            return Path(name[len(_PATHS[key]) + 1 :]).parts[0].removesuffix(".py")
    for folder in OURS:
        if name.startswith(folder):
            return Path(folder).name
    return "Python"


@functools.lru_cache(maxsize=4096)
def is_ours(name: str) -> bool:
    """Return whether a file belongs to the ranks or the checks. No report shows its lines."""
    return name.startswith(_COURSE) or _HANDED_OUT.fullmatch(name) is not None
