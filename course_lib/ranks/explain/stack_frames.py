"""The lines that led to an exception, with their variables, for post-mortem debugging.

A frame holds only text, and not much of it, so that it can be sent and keeps no object alive.
"""

from __future__ import annotations

import linecache
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType, FunctionType, ModuleType, TracebackType
from typing import Any

import torch

from course_lib.ranks.explain.lines import is_installed

_FRAMES = 12
"""Number of the user's own frames that are kept, counted from the innermost."""
_LOCALS = 40
_CHARACTERS = 200
_ELEMENTS = 10


@dataclass(frozen=True)
class StackFrame:
    """One line of the user's code that was running, as text."""

    file: str
    """Its name for people: ``Cell In[3]``, or the file's path."""
    line: int
    function: str
    source: str
    """The line itself."""
    locals: dict[str, str] = field(default_factory=dict)
    """Variable → its value as text, shortened."""

    def __str__(self) -> str:
        width = max(map(len, self.locals), default=0)
        rows = [f"    {name.ljust(width)} = {text}" for name, text in self.locals.items()]
        return "\n".join(
            [f"{self.file}, line {self.line}, in {self.function}", f"  → {self.source}", *rows]
        )


def frames_of(error: BaseException, labels: Mapping[str, str]) -> tuple[StackFrame, ...]:
    """Return the lines of the user's code that led to an exception, outermost first.

    `labels`: file name → its name for people, for example ``Cell In[3]``.
    """
    all_frames = list(_walk(error.__traceback__))
    own = [each for each in all_frames if _is_own(each[0].f_code.co_filename, labels)]
    return tuple(_frame(frame, line, labels) for frame, line in own[-_FRAMES:])


def _walk(tb: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while tb is not None:
        yield tb.tb_frame, tb.tb_lineno
        tb = tb.tb_next


def _is_own(name: str, labels: Mapping[str, str]) -> bool:
    return name in labels or not is_installed(name)


def _frame(frame: FrameType, line: int, labels: Mapping[str, str]) -> StackFrame:
    name = frame.f_code.co_filename
    return StackFrame(
        labels.get(name, name),
        line,
        frame.f_code.co_qualname,
        linecache.getline(name, line).strip(),
        _locals(frame),
    )


def _locals(frame: FrameType) -> dict[str, str]:
    """Return a frame's latest variables as text, without those that cannot explain a failure."""
    hidden: tuple[type, ...] = (ModuleType,)
    if frame.f_code.co_name == "<module>":  # a cell: also hide the functions and classes it defines
        hidden = (ModuleType, FunctionType, type)
    shown_variables = [
        (name, value)
        for name, value in frame.f_locals.items()
        if not name.startswith("_") and not isinstance(value, hidden)
    ]
    return {name: shortened(value) for name, value in shown_variables[-_LOCALS:]}


def shortened(value: Any) -> str:
    """Return `value` as one line of at most 200 characters, even if its repr fails."""
    text = " ".join(_SHORT.repr(value).split())
    return text if len(text) <= _CHARACTERS else text[: _CHARACTERS - 1] + "…"


class _Short(reprlib.Repr):
    """Shortens containers before it turns them into text; shows a tensor's shape and dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = 6
        self.maxstring = self.maxother = _CHARACTERS

    def repr1(self, x: Any, level: int) -> str:
        try:
            if isinstance(x, torch.Tensor):
                return _tensor(x)
            return super().repr1(x, level)
        except Exception as error:
            return f"<{type(x).__name__} whose repr raises {type(error).__name__}>"


def _tensor(value: torch.Tensor) -> str:
    plain = type(value) in (torch.Tensor, torch.nn.Parameter)
    description = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if plain and value.numel() <= _ELEMENTS and value.device.type == "cpu" and not value.is_sparse:
        return f"{value.detach()}, {description}"
    on = "" if value.device.type == "cpu" else f" on {value.device}"
    return f"{'tensor' if plain else type(value).__name__} of {description}{on}"


_SHORT = _Short()
