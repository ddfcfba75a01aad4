"""For `make coverage`: ranks that are ended save the numbers of the lines that they ran."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

SAVING_SECONDS = 2.0


@contextmanager
def ranks_that_save_what_they_ran() -> Iterator[None]:
    """Under coverage, ask ranks to end before they are killed: coverage's handler saves its data.

    Those that stand in compiled code cannot, and are killed a little later. Ranks in a sandbox are
    left alone: they have no place to save anything.
    """
    if "COVERAGE_PROCESS_CONFIG" not in os.environ:
        yield
        return
    from course_lib.ranks import host
    from course_lib.ranks.processes import fork_client

    at_once = fork_client.ForkServer.signal

    def politely(server: fork_client.ForkServer, pids: Sequence[int], number: int) -> None:
        if number == signal.SIGKILL and server is fork_client._server:
            at_once(server, pids, signal.SIGTERM)
            for pid in pids:
                server.exit_status(pid, wait=SAVING_SECONDS)
        at_once(server, pids, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_client.ForkServer, "signal", politely)
        yield
        if host._current is not None:  # it would be killed at exit, when nobody is polite any more
            host._current.end()
