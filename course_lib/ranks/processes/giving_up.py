"""Ending a call on a rank whose process shall stay: on SIGUSR2, whatever the rank is doing.

Python code, and waits for communication, are ended by an exception from the signal's handler. A
rank that waits in compiled code, as PyTorch's DDP does for its last bucket, runs no handler; so a
thread hears of the signal too, and fails the futures that the rank may be waiting for. An import is
not ended in the middle: PyTorch's own do not work a second time. So the signal comes several times,
and may come late: the board says which call it is to end.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from course_lib.ranks.metered.recorder import Recorder
from course_lib.ranks.metered.work import GivenUp
from course_lib.ranks.stopping import in_import

current = 0
"""The call that runs, by its number; 0 if there is none.

The worker ends it by itself: at a function's beginning or end, as that of a ``with``, the signal's
handler may run, and its exception would leave this as it is.
"""

_failing = threading.Lock()
_recorder: Recorder | None = None


def listen(recorder: Recorder) -> None:
    """Prepare this rank: in its main thread, once."""
    global _recorder
    _recorder = recorder
    heard, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    signal.signal(signal.SIGUSR2, _raise)

    def fail_futures() -> None:
        while True:
            came = os.read(heard, 64)
            with _failing:
                if signal.SIGUSR2 in came and _to_be_ended():
                    recorder.give_up()

    threading.Thread(target=fail_futures, name="giving-up", daemon=True).start()


def begin(call: int) -> None:
    """Note that a call begins; what is still failed for the one before it, is failed by then."""
    global current
    with _failing:
        current = call


def _to_be_ended() -> bool:
    if _recorder is None or not current:
        return False
    return _recorder.board.given_up(_recorder.rank) == current


def _raise(number: int, frame: FrameType | None) -> None:
    if _to_be_ended() and not in_import(frame):
        raise GivenUp
