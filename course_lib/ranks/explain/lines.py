"""The line of the user's code that runs: the one thing that makes a report useful.

The innermost line is mostly PyTorch's or ours. A cell of the notebook says more than any of them,
and after that a file that is neither installed nor part of Python.
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
"""Folders whose lines are never the user's: ranks, all of it, checks, the race, and PyTorch."""
_HANDED_OUT = re.compile(r".*[/\\]\d\d_\w+[/\\](checks|judges|\w+_judges)\.py")
"""Files of an assignment. Their lines are never the user's, either."""
_PATHS = sysconfig.get_paths()
_INSTALLED = (
    *OURS,
    *(_PATHS[key] + os.sep for key in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<frozen",
)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (\S+)', re.MULTILINE)


def named(name: str, line: int | None, labels: Mapping[str, str]) -> str:
    """Return for example ``Cell In[3], line 7``; `labels`: file name → how a person calls it."""
    return f"{labels.get(name) or _basename(name)}, line {line}"


_basename = functools.lru_cache(maxsize=4096)(os.path.basename)


def innermost(
    frames: Iterable[tuple[str, int | None]], labels: Mapping[str, str]
) -> tuple[str, int | None] | None:
    """Return the innermost of `frames`, given from the inside out, that is the user's own.

    A cell, if there is one; else a file that is neither installed nor Python's; else one that is
    neither ours nor PyTorch's; else ``None``.
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
    """Return what a file that is no cell says: `_OWN`, 1 if it is installed, 0 if it is ours."""
    if not is_installed(name):
        return _OWN
    return 0 if _is_no_package(name) else 1


def _is_no_package(name: str) -> bool:
    return is_ours(name) or name.startswith((TORCH, "<frozen"))


def locator(labels: Mapping[str, str]) -> Callable[[], str]:
    """Return a function that names the innermost line of the user's code that is running."""

    def locate() -> str:
        # As `innermost` does, but a line's number, which takes time, is asked of one frame only.
        frame: FrameType | None = sys._getframe(1)
        best, best_rank = None, 0
        while frame is not None:
            name = frame.f_code.co_filename
            if name in labels:  # as mostly in a notebook: nothing further out says more
                return named(name, frame.f_lineno, labels)
            rank = _rank_of(name)
            if rank > best_rank:
                best, best_rank = frame, rank
                if rank == _OWN and not labels:
                    break  # there are no cells further out
            frame = frame.f_back
        return named(best.f_code.co_filename, best.f_lineno, labels) if best else ""

    return locate


def line_of_thread(thread: int | None, labels: Mapping[str, str]) -> str:
    """Return the innermost line of the user's own that a thread of this process runs."""
    frame = sys._current_frames().get(thread or 0)
    frames = []
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    found = innermost(frames, labels)
    return named(*found, labels) if found else ""


def line_in_dump(dump: str, labels: Mapping[str, str]) -> str:
    """Return the innermost line of the user's own in what ``faulthandler`` wrote; or nothing."""
    found = innermost(((name, int(line)) for name, line, _ in _FRAME.findall(dump)), labels)
    return named(*found, labels) if found else ""


def innermost_function(dump: str) -> str:
    """Return the name of the innermost Python function in what ``faulthandler`` wrote."""
    frames = _FRAME.findall(dump)
    return frames[0][2] if frames else ""


def is_installed(name: str) -> bool:
    """Return whether a file belongs to Python, to an installed package or to this one."""
    return name.startswith(_INSTALLED) or is_ours(name)


def package_of(name: str) -> str:
    """Return which installed package a file belongs to: ``torch``, or ``Python``."""
    for key in ("purelib", "platlib"):
        if name.startswith(_PATHS[key] + os.sep):
            return Path(name[len(_PATHS[key]) + 1 :]).parts[0].removesuffix(".py")
    for folder in OURS:
        if name.startswith(folder):
            return Path(folder).name
    return "Python"


@functools.lru_cache(maxsize=4096)
def is_ours(name: str) -> bool:
    """Return whether a file belongs to ranks or checks, whose lines no report shows."""
    return name.startswith(_COURSE) or _HANDED_OUT.fullmatch(name) is not None
