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
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TypeVar

import torch

_RANKS = Path(__file__).parents[1]
_COURSE = str(_RANKS.parent) + os.sep
_OURS = tuple(
    str(path) + os.sep
    for path in (_RANKS, _RANKS.with_name("checking"), _RANKS.with_name("capstone"))
)
TORCH = str(Path(torch.__file__).parent) + os.sep
"""PyTorch's folder."""
_HANDED_OUT = re.compile(r".*[/\\]\d\d_\w+[/\\](checks|judges|\w+_judges)\.py")
"""Files of an assignment whose lines are not the user's either: its checks and judges."""
_PATHS = sysconfig.get_paths()
_PACKAGES = tuple(_PATHS[key] + os.sep for key in ("purelib", "platlib"))
_PYTHON = (*(_PATHS[key] + os.sep for key in ("stdlib", "platstdlib")), "<frozen")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (\S+)', re.MULTILINE)


def named(name: str, line: int | None, labels: Mapping[str, str]) -> str:
    """Return for example ``Cell In[3], line 7``. `labels`: file name → its name for people."""
    return f"{labels.get(name) or _basename(name)}, line {line}"


_basename = functools.lru_cache(maxsize=4096)(os.path.basename)


def frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


Line = TypeVar("Line")


def innermost(
    frames: Iterable[tuple[str, Line]], labels: Mapping[str, str]
) -> tuple[str, Line] | None:
    """Return the innermost of `frames` that is the user's own. The innermost frame comes first.

    Each is the name of a file and what tells the line in it. A frame of a cell is preferred. Then
    the rank of its file decides: see `_rank_of`. Without any useful frame, return ``None``.
    """
    best, best_rank = None, 0
    for name, line in frames:
        if name in labels:  # a cell, the usual case in a notebook: no outer frame says more
            return name, line
        rank = _rank_of(name)
        if rank > best_rank:
            best, best_rank = (name, line), rank
            if rank == _OWN and not labels:
                break  # without labels, no outer frame can be a cell
    return best


_OWN = 3


@functools.lru_cache(maxsize=4096)
def _rank_of(name: str) -> int:
    """Return how useful a file that is not a cell is in a report.

    The user's own files are `_OWN`, and other people's packages are 2. The course's rungs are 1:
    their lines help only if a program of the course itself runs. All else is 0. The course counts
    the same in a wheel, in an editable install and in a checkout.
    """
    if is_ours(name) or name.startswith(TORCH):
        return 0
    if name.startswith(_COURSE):
        return 1
    if name.startswith(_PACKAGES):
        return 2
    return 0 if name.startswith(_PYTHON) else _OWN


def locator(labels: Mapping[str, str]) -> Callable[[], str]:
    """Return a function that names the innermost line of the user's code that is running."""

    def locate() -> str:
        # The number of a line takes time, so it is found out for one frame only.
        frames = ((frame.f_code.co_filename, frame) for frame in frames_from(sys._getframe(1)))
        best = innermost(frames, labels)
        return named(best[0], best[1].f_lineno, labels) if best else ""

    return locate


_MOST = 20


def own_lines(labels: Mapping[str, str]) -> tuple[tuple[str, int], ...]:
    """Return the user's functions that are running in this thread; see `Event.lines`.

    With cells, only functions of cells count, else those of files that are not installed. Functions
    without a name and what is around the innermost twenty are left out.
    """
    lines: dict[str, int] = {}
    for frame in frames_from(sys._getframe(1)):
        code = frame.f_code
        if code.co_filename in labels if labels else _rank_of(code.co_filename) == _OWN:
            name = code.co_qualname.replace(".<locals>", "")
            if "<" not in name:
                lines.setdefault(name, frame.f_lineno - code.co_firstlineno + 1)
        if len(lines) == _MOST:
            break
    return tuple(reversed(lines.items()))


def line_of_thread(thread: int | None, labels: Mapping[str, str]) -> str:
    """Return the innermost line of the user's code that a thread of this process is running."""
    frames = frames_from(sys._current_frames().get(thread or 0))
    line = innermost(((frame.f_code.co_filename, frame.f_lineno) for frame in frames), labels)
    return named(*line, labels) if line else ""


def line_in_dump(dump: str, labels: Mapping[str, str]) -> str:
    """Return the innermost line of the user's code in a dump of ``faulthandler``, or ``""``."""
    line = innermost(((name, int(line)) for name, line, _ in _FRAME.findall(dump)), labels)
    return named(*line, labels) if line else ""


def innermost_function(dump: str) -> str:
    """Return the name of the innermost Python function in a dump of ``faulthandler``."""
    frames = _FRAME.findall(dump)
    return frames[0][2] if frames else ""


def is_installed(name: str) -> bool:
    """Return whether a file belongs to Python, to an installed package or to the course."""
    return _rank_of(name) != _OWN


def may_be_edited(name: str) -> bool:
    """Return whether a user, or an author of the course, may change a file while ranks live."""
    return not is_ours(name) and not name.startswith((TORCH, *_PACKAGES, *_PYTHON))


@functools.lru_cache(maxsize=4096)
def is_ours(name: str) -> bool:
    """Return whether a file belongs to the ranks or the checks. No report shows its lines."""
    return name.startswith(_OURS) or _HANDED_OUT.fullmatch(name) is not None
