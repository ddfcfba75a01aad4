"""A descriptor holds process 1 of a sandbox, so it cannot be confused with a later process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from autograder.sandbox.first_process import hold, kill

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="pidfd is Linux's"),
]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def reported(text: bytes, parent: int, timeout: float = 5.0) -> int | None:
    """Return the descriptor after a report of `text`, whose writer has then hung up."""
    reads, writes = os.pipe()
    with open(reads, "rb", buffering=0) as info:
        os.write(writes, text)
        os.close(writes)
        return hold(info, parent, timeout)


def child(pid: int) -> bytes:
    return json.dumps({"child-pid": pid}).encode()


def test_a_child_is_held_and_killed(sleeper: subprocess.Popen[bytes]) -> None:
    held = reported(child(sleeper.pid), os.getpid())
    assert held is not None and sleeper.poll() is None
    kill(held, 20)
    assert sleeper.wait(300) == -9
    with pytest.raises(OSError):
        os.fstat(held)


def test_whoever_is_no_child_is_left_alone(sleeper: subprocess.Popen[bytes]) -> None:
    """The number may have gone to another process since it was reported."""
    assert reported(child(sleeper.pid), parent=sleeper.pid) is None
    assert sleeper.poll() is None


def test_no_report_is_an_error() -> None:
    with pytest.raises(OSError, match="ended at once"):
        reported(b"", os.getpid())
    with pytest.raises(OSError, match="ended at once"):
        reported(b'{"child-pid"', os.getpid())  # it was cut off
    reads, writes = os.pipe()
    with (
        open(reads, "rb", buffering=0) as info,
        pytest.raises(TimeoutError, match="it reported nothing"),
    ):
        hold(info, os.getpid(), 0.05)
    os.close(writes)
