"""Start a script by torchrun, as in a terminal."""

import os
import subprocess
import sys
from pathlib import Path

from tests.helpers import ROOT

SCRIPTS = ROOT / "lectures" / "scripts"


def torchrun(folder: Path, world_size: int, script: str | Path, *options: str) -> str:
    """Run a script in `folder` on so many ranks; return what they print.

    `script` is a path, or the name of a script of the lectures.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(world_size), str(SCRIPTS / script), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    run = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    return run.stdout
