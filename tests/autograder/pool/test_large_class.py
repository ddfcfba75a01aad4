"""A class of three hundred, with everything that people and programs do to a grader."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from autograder.commands.demo import ASSIGNMENT
from tests.helpers.course_folders import needs_sources
from tests.helpers.whole_class import (
    Course,
    booked,
    course_of,
    hand_in,
    large_class,
    path_kept,
    unexpected,
)


def memory(process: psutil.Process) -> float:
    """Return the GiB that a process and all below it hold, pages that they share counted once."""
    total = 0.0
    for each in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            total += each.memory_full_info().pss / 2**30
    return total


@needs_sources
@pytest.mark.large
@pytest.mark.filterwarnings("ignore")  # nbgrader's, and what it stands on
@pytest.mark.timeout(8 * 3600)
def test_a_class_of_three_hundred(tmp_path: Path) -> None:
    """Two kills on the way, all as expected, and all again with the same points.

    CLASS_SIZE takes another number than 300; -s shows what it took.
    """
    count = int(os.environ.get("CLASS_SIZE", "300"))
    with path_kept():
        course = Course(course_of(tmp_path / "course"), {})
        course.members = large_class(course.root, count)
        hand_in(course.root, course.members)
        start = time.monotonic()
        for part in (4, 2):
            course.killed("grade", ASSIGNMENT, at=count // part)
        with (tmp_path / "said").open("w+") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", "autograder", "grade", "--course", str(course.root)],
                stdout=said,
                stderr=said,
                stdin=subprocess.DEVNULL,
            )
            peak = 0.0
            while process.poll() is None:
                with contextlib.suppress(psutil.Error):
                    peak = max(peak, memory(psutil.Process(process.pid)))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
        took = time.monotonic() - start
        first, graded = booked(course.root), len(course.verdicts())
        told = {
            "graded": graded,
            "minutes": round(took / 60, 1),
            "per minute, kills and booking included": round(60 * graded / took, 1),
            "peak memory, GiB": round(peak, 2),
        }
        print(json.dumps(told), flush=True)
        assert process.returncode == 0, (tmp_path / "said").read_text()[-3000:]
        assert graded == sum(member.graded for member in course.members.values())
        assert unexpected(course.members, first) == []
        again = course.start("regrade", ASSIGNMENT, "--all", "--book")
        words, _ = again.communicate()
        assert again.returncode == 0, words[-3000:]
        assert f"0 gain, 0 lose, {graded} have as many points as before" in words, words[-3000:]
        assert booked(course.root) == first
