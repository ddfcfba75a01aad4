"""Ctrl-C on many ranks: each ends at once and quietly, and rank 0 reports what was kept.

By default, one rank would raise KeyboardInterrupt. The others wait in compiled code and would fail
because that rank has gone. There would be as many tracebacks as ranks. On a GPU some would even
wait forever.
"""

import os
import signal
import threading
from collections.abc import Callable

INTERRUPTED = 128 + signal.SIGINT
"""The exit status of a command that Ctrl-C ended."""


def leave_on_interrupt(last_words: Callable[[], str]) -> None:
    """From now on, Ctrl-C (SIGINT) prints `last_words()` and ends this process with status 130.

    This works no matter what the main thread does or waits for, and even if `last_words` fails.
    Call it on the main thread (else ValueError). Only the operating system cleans up. So at any
    moment, files must be complete, or recognisable as incomplete.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def listen() -> None:
        while signal.SIGINT not in os.read(reader, 1):
            pass
        try:
            # Do not write through sys.stderr: the main thread may hold its lock.
            os.write(2, last_words().encode(errors="backslashreplace"))
        finally:
            os._exit(INTERRUPTED)  # nothing else ends it: Python no longer raises KeyboardInterrupt

    # Python's handler runs only when the main thread returns from compiled code to Python. But the
    # signal's number is written to this pipe as soon as the signal arrives.
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, lambda number, frame: None)
    threading.Thread(target=listen, name="interrupt", daemon=True).start()
