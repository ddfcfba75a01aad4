"""A class on a real Slurm that loses one of its nodes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from autograder.commands.demo import ASSIGNMENT
from tests.helpers.course_folders import needs_sources
from tests.helpers.real_slurm import can_run, real_slurm
from tests.helpers.whole_class import (
    booked,
    course_of,
    hand_in,
    large_class,
    small_class,
    unexpected,
)


@needs_sources
@pytest.mark.large
@pytest.mark.timeout(4 * 3600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not can_run(), reason="needs root and Debian's slurm-wlm")
def test_a_node_is_lost_and_no_submission() -> None:
    """CLASS_SIZE sets another number than 60; up to 12 there are few cases."""
    pytest.importorskip("submitit")
    count = int(os.environ.get("CLASS_SIZE", "60"))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        folder.chmod(0o755)
        (folder / "slurm").mkdir()
        root = course_of(folder / "course", less=count <= 12)
        members = small_class(root) if count <= 12 else large_class(root, count)
        hand_in(root, members)
        graded = root / "grading" / "graded" / ASSIGNMENT
        with real_slurm(folder / "slurm") as slurm, (folder / "said").open("w") as said:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "autograder", "grade", "--course", str(root)),
                    *("--slurm", "--jobs", "1", "--chunk", str(max(2, count // 8))),
                ],
                env=slurm.environment,
                stdout=said,
                stderr=said,
                stdin=subprocess.DEVNULL,
            )
            while len(list(graded.glob("*/*.json"))) < count // 6:
                assert process.poll() is None, (folder / "said").read_text()
                time.sleep(0.2)
            assert slurm.kill_node("n2"), "no job ran on the node"
            time.sleep(60)
            slurm.start_node("n2")
            assert process.wait() == 0, (folder / "said").read_text()
            log = (folder / "slurm" / "slurmctld.log").read_text()
            print((folder / "said").read_text())
        assert "due to failure of node n2" in log or "n2 not responding" in log, log[-3000:]
        assert unexpected(members, booked(root)) == []
