"""Ending Python code from outside, but never an import: one in the middle would stay half done.

What is half imported stays so for the rest of the process; PyTorch's own do not work again.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from types import FrameType

_IMPORT = "<frozen importlib._bootstrap>"


def in_import(frame: FrameType | None) -> bool:
    """Return whether a frame, or one that has called it, belongs to an ``import``."""
    while frame is not None:
        if frame.f_code.co_filename == _IMPORT:
            return True
        frame = frame.f_back
    return False


def is_importing(ident: int) -> bool:
    """Return whether a thread is inside an ``import``."""
    return in_import(sys._current_frames().get(ident))


def raise_in_thread(thread: threading.Thread, error: type[BaseException]) -> None:
    """Raise `error` in another thread at its next step of Python code, but not while it imports."""
    if thread.ident is not None and not is_importing(thread.ident):
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(error)
        )
