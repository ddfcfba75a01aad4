"""Ending a call on a rank whose process shall stay: on SIGUSR2, whatever the rank is doing.

Python code, and waits for communication, are ended by an exception from the signal's handler. A
rank that waits in compiled code, as PyTorch's DDP does for its last bucket, runs no handler; so a
thread hears of the signal too, and fails the futures that the rank may be waiting for.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from types import FrameType

from course_lib.ranks.metered.recorder import Recorder
from course_lib.ranks.metered.work import GivenUp

armed = False
"""Whether a call runs that the signal shall end; else it does nothing.

The worker sets it by itself: at a function's beginning or end, as that of a ``with``, the signal's
handler may run, and its exception would leave this as it is.
"""


_taking = threading.Lock()
_heard = -1
_came = False
"""Whether the signal has come since `forget`."""


def listen(recorder: Recorder) -> None:
    """Prepare this rank: in its main thread, once."""
    global _heard
    _heard, tell = os.pipe()
    os.set_blocking(_heard, False)
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    signal.signal(signal.SIGUSR2, _raise)
    poll = select.poll()
    poll.register(_heard, select.POLLIN)

    def fail_futures() -> None:
        while True:
            poll.poll()
            with _taking:
                if signal.SIGUSR2 in _take() and armed:
                    recorder.give_up()

    threading.Thread(target=fail_futures, name="giving-up", daemon=True).start()


def forget() -> None:
    """Forget, before a call, the signals that the thread has not heard yet: they ended another."""
    global _came
    # A signal of before has had its handler by now: that runs where a function begins, at the
    # latest. So most calls need not ask the system.
    if _came:
        _came = False
        with _taking:
            _take()


def _take() -> bytes:
    try:
        return os.read(_heard, 64)
    except BlockingIOError:
        return b""


def _raise(number: int, frame: FrameType | None) -> None:
    global _came
    _came = True
    if armed:
        raise GivenUp
