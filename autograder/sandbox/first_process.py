"""Process 1 of a sandbox, whose end ends all others: find it, hold it, kill it."""

import contextlib
import json
import os
import select
import signal
import time
from pathlib import Path
from typing import IO


def hold(info: IO[bytes], parent: int, timeout: float) -> int | None:
    """Return a descriptor of process 1 after bubblewrap reports it; None if it is gone already.

    The descriptor always refers to this process, but its number may later belong to another.

    Args:
        info: the read end of a pipe; bubblewrap writes to the other end.
        parent: bubblewrap's own pid.
        timeout: seconds to wait for the report.

    Raises:
        OSError: bubblewrap ended without a report, or took too long.
    """
    pid = _reported_pid(info, timeout)
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
        if f"\nPPid:\t{parent}\n" in status:
            return descriptor
    os.close(descriptor)
    return None


def kill(descriptor: int, timeout: float) -> None:
    """Kill process 1, wait until it is gone, at most ``timeout`` seconds, and close it.

    When process 1 of a namespace dies, the kernel kills all the others.
    """
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    # The descriptor becomes readable when process 1 is dead. All the others are dead before that.
    select.select([descriptor], [], [], timeout)
    os.close(descriptor)


def _reported_pid(info: IO[bytes], timeout: float) -> int:
    said, deadline = b"", time.monotonic() + timeout
    while select.select([info], [], [], max(0.0, deadline - time.monotonic()))[0]:
        piece = info.read(4096)
        if not piece:
            raise OSError("it ended at once; its output says why")
        said += piece
        with contextlib.suppress(ValueError):
            return int(json.loads(said)["child-pid"])
    raise TimeoutError(f"it reported nothing for {timeout:.0f} s")
