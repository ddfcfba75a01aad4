"""Ending Python code from outside, but at no bad moment.

A module that is half imported stays so for the rest of the process; PyTorch's own do not work
again. So an import is never ended. And Ctrl-C waits until a short block is over.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Run a short block to its end; an interrupt that came in between is raised after it.

    Without it, an interrupt between starting a process and noting it down would lose the process.
    Only the main thread is ever interrupted, so elsewhere this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    before = signal.getsignal(signal.SIGINT)
    if before is None:  # installed by compiled code: it cannot be put back
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came and callable(before):
            before(*came[-1])
