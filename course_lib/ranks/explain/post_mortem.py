"""What a rank's variables were when it failed: as text, since the rank has gone on since."""

from __future__ import annotations

import linecache
import reprlib
import traceback
import types
from collections.abc import Mapping

import torch

from course_lib.ranks.explain.lines import is_installed, named

_FRAMES = 4
_NAMES = 30
_WIDTH = 200
"""Characters of one value."""


def describe_frames(error: BaseException, labels: Mapping[str, str]) -> str:
    """Return the user's own frames of an exception, innermost first, with their variables.

    At most 4 frames of 30 variables. `labels`: file name → how a person calls it.
    """
    walked = list(traceback.walk_tb(error.__traceback__))
    own = [(f, line) for f, line in reversed(walked) if not is_installed(f.f_code.co_filename)]
    return "\n\n".join(_describe(frame, line, labels) for frame, line in own[:_FRAMES])


def _describe(frame: types.FrameType, line: int, labels: Mapping[str, str]) -> str:
    name = frame.f_code.co_filename
    code = linecache.getline(name, line).strip()
    where = f"{named(name, line, labels)}, in {frame.f_code.co_name}"
    lines = [where, f"    {code}" if code else ""]
    variables = [
        (key, value)
        for key, value in frame.f_locals.items()
        if not key.startswith("_") and not isinstance(value, types.ModuleType)
    ]
    lines += [f"    {key} = {short(value)}" for key, value in variables[:_NAMES]]
    if len(variables) > _NAMES:
        lines.append(f"    … and {len(variables) - _NAMES} more")
    return "\n".join(filter(None, lines))


def short(value: object) -> str:
    """Return a value in one line of bounded length; a tensor by its shape and first elements."""
    try:
        if isinstance(value, torch.Tensor):
            text = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
            if value.numel() and value.device.type != "meta":
                some = value.detach().flatten()[:6].tolist()
                more = ", …" if value.numel() > 6 else ""
                text += f" [{', '.join(f'{each:.4g}' for each in some)}{more}]"
        else:
            text = _repr.repr(value)
    except Exception as error:  # of somebody's __repr__
        text = f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    text = " ".join(text.split())
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"


_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _WIDTH
_repr.maxlist = _repr.maxtuple = _repr.maxdict = _repr.maxset = 10
