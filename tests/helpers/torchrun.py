"""Jobs of torchrun, started as in a terminal."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from tests.helpers import ROOT

SCRIPTS = ROOT / "lectures" / "scripts"


def start(folder, *arguments, ranks=2, stderr=subprocess.STDOUT, **variables):
    """Start a job on this machine; `arguments`: what follows the options of ``torchrun``."""
    command = [sys.executable, "-m", "torch.distributed.run"]
    if "--nnodes" not in arguments:
        command.append("--standalone")
    # torchrun never removes the folder that it makes for logs.
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])
    variables |= {"PYTHONPATH": path, "TMPDIR": str(folder)}
    return subprocess.Popen(
        [*command, "--nproc-per-node", str(ranks), *arguments],
        cwd=folder,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=stderr,
    )


def end(job: subprocess.Popen[bytes]) -> bytes:
    """End a job and its ranks; return what they printed meanwhile."""
    if job.poll() is None:
        ranks = psutil.Process(job.pid).children()
        job.terminate()
        try:
            job.wait(20)
        except subprocess.TimeoutExpired:
            for process in (job, *ranks):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            job.wait()
    with job.stdout:
        return job.stdout.read()


def finish(job: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Wait for a job's end, and return what it prints; end it after five minutes."""
    try:
        return job.communicate(timeout=300)
    finally:
        if job.poll() is None:
            end(job)


def torchrun(folder: Path, world_size: int, script: str | Path, *options: str) -> str:
    """Run a script in `folder` on so many ranks; return what they print.

    `script` is a path, or the name of a script of the lectures.
    """
    job = start(folder, SCRIPTS / script, *options, ranks=world_size, stderr=subprocess.PIPE)
    printed, errors = finish(job)
    assert job.returncode == 0, errors.decode()
    return printed.decode()
