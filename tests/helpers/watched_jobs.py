"""Jobs of ``torchrun`` that are watched, and what the watch tells of them."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests.helpers import ROOT

TOLD = "reported by course_lib.ranks.watch"


def torchrun(folder, *arguments, ranks=4, **variables):
    """Start a job on this machine; `arguments`: what follows the options of ``torchrun``."""
    command = [sys.executable, "-m", "torch.distributed.run"]
    if "--nnodes" not in arguments:
        command.append("--standalone")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)]),
        "TMPDIR": str(folder),  # torchrun never removes its folder for logs
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    return subprocess.Popen(
        [*command, "--nproc-per-node", str(ranks), *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def output_of(*jobs, seconds=240, until=lambda text: TOLD in text):
    """Return what jobs print until all have ended, or `until` and half a second is over.

    Those that still run are then ended as ``torchrun`` ends them.
    """
    printed = b""
    end_at = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        for job in jobs:
            assert job.stdout is not None
            selector.register(job.stdout, selectors.EVENT_READ)
        while selector.get_map() and time.monotonic() < end_at:
            for key, _ in selector.select(0.1):
                data = os.read(key.fd, 1 << 16)
                if not data:
                    selector.unregister(key.fileobj)
                printed += data
                if until(printed.decode("utf-8", "replace")):
                    end_at = min(end_at, time.monotonic() + 0.5)
    for job in jobs:
        printed += end(job)
    return printed.decode("utf-8", "replace")


def end(job: subprocess.Popen[bytes]) -> bytes:
    """End a job and its ranks; return what they printed meanwhile."""
    if job.poll() is None:
        ranks = Path(f"/proc/{job.pid}/task/{job.pid}/children")
        pids = [int(pid) for pid in ranks.read_text().split()] if ranks.exists() else []
        job.terminate()
        try:
            job.wait(20)
        except subprocess.TimeoutExpired:
            job.kill()
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            job.wait()
    with job.stdout:
        return job.stdout.read()


def told_by(text: str) -> str:
    """Return what the watch told, without the rest of a job's output; empty if it told nothing."""
    before, marker, after = text.partition(TOLD)
    if not marker:
        return ""
    kind = before.rpartition("\n")[2].split(",")[0]
    return f"{kind}{after}"
