"""Interrupt Python code from outside, but only at safe moments.

A half-imported module stays half-imported for the rest of the process. PyTorch's modules then never
work again. So an import is never interrupted. And Ctrl-C can be delayed to the end of a short
block.
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
    """Return whether a frame, or one of its callers, belongs to an ``import``."""
    while frame is not None and frame.f_code.co_filename != _IMPORT:
        frame = frame.f_back
    return frame is not None


def raise_in_thread(thread: threading.Thread, error: type[BaseException]) -> None:
    """Raise `error` in another thread at its next step of Python code; do nothing if it imports."""
    if thread.ident is not None and not in_import(sys._current_frames().get(thread.ident)):
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(error)
        )


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Run a short block to its end. An interrupt that comes during the block is raised after it.

    Without this, an interrupt between the start of a process and its registration would lose the
    process. Only the main thread is ever interrupted, so in other threads this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    before = signal.getsignal(signal.SIGINT)
    if before is None:  # a handler that compiled code has installed; it cannot be restored
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came and callable(before):
            before(*came[-1])
