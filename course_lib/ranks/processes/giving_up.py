"""Ending a call on a rank whose process shall stay: on SIGUSR2, whatever the rank is doing.

Python code, and waits for communication, are ended by an exception from the signal's handler. A
rank that waits in compiled code, as PyTorch's DDP does for its last bucket, runs no handler; so a
thread hears of the signal too, and fails the futures that the rank may be waiting for.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from course_lib.ranks.metered.recorder import Recorder
from course_lib.ranks.metered.work import GivenUp

_armed = False


def listen(recorder: Recorder) -> None:
    """Prepare this rank: in its main thread, once."""
    heard, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    signal.signal(signal.SIGUSR2, _raise)

    def fail_futures() -> None:
        while numbers := os.read(heard, 64):
            if signal.SIGUSR2 in numbers and _armed:
                recorder.give_up()

    threading.Thread(target=fail_futures, name="giving-up", daemon=True).start()


def _raise(number: int, frame: FrameType | None) -> None:
    if _armed:
        raise GivenUp


@contextmanager
def can_be_given_up() -> Iterator[None]:
    """Let the signal end the block; elsewhere it does nothing."""
    global _armed
    _armed = True
    try:
        yield
    finally:
        _armed = False
