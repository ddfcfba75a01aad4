"""Ctrl-C on many ranks at once: each leaves at once and quietly, and rank 0 says what was kept.

Left to Python, one rank raises KeyboardInterrupt, and the others, which wait in compiled code, fail
because it has gone: as many tracebacks as ranks. On a GPU some would not even fail, but wait on.
"""

import os
import signal
import threading
from collections.abc import Callable

INTERRUPTED = 128 + signal.SIGINT
"""The exit status of a command that Ctrl-C ended."""


def leave_on_interrupt(last_words: Callable[[], str]) -> None:
    """From now on, Ctrl-C (SIGINT) prints `last_words()` and ends this process with status 130.

    Whatever the main thread does, or waits for, and also if `last_words` fails. To be called on the
    main thread (else ValueError).
    Nothing is cleaned up that the operating system does not: files must be complete, or
    recognisable, at any moment.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def listen() -> None:
        while signal.SIGINT not in os.read(reader, 1):
            pass
        try:
            # Not through sys.stderr: the main thread may hold its lock.
            os.write(2, last_words().encode(errors="backslashreplace"))
        finally:
            os._exit(INTERRUPTED)  # nothing else would: Python no longer raises KeyboardInterrupt

    # Python's handler runs on the main thread, when that returns to Python. But the signal's number
    # is written to this pipe the moment it arrives.
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, lambda number, frame: None)
    threading.Thread(target=listen, name="interrupt", daemon=True).start()
