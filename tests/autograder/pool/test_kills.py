"""Two hundred kills at random moments, over a class of twelve: the same grades as without."""

from __future__ import annotations

import contextlib
import random
import shutil
import subprocess
import threading
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
    small_class,
    unexpected,
)

pytestmark = [needs_sources, pytest.mark.large, pytest.mark.timeout(3600)]
KILLS = 200
COMMAND = 0.05
"""Number of kills of the command itself, instead of a process below it."""


def kill_now_and_then(command: subprocess.Popen[str], random_: random.Random, most: int) -> int:
    """Kill processes below a command, and now and then the command, until it ends; count them."""
    killed = 0
    root = psutil.Process(command.pid)
    while command.poll() is None and killed < most:
        time.sleep(random_.uniform(0.2, 3.0))
        with contextlib.suppress(psutil.Error, IndexError):
            below = root.children(recursive=True)
            victim = root if random_.random() < COMMAND else random_.choice(below)
            victim.kill()
            killed += 1
    return killed


def test_the_grades_are_those_without_kills(tmp_path: Path) -> None:
    random_ = random.Random(20)
    kills = rounds = 0
    course = Course(course_of(tmp_path, less=True), {})
    course.members = small_class(course.root)
    hand_in(course.root, course.members)
    while kills < KILLS:
        rounds += 1
        if len(booked(course.root)) == 11:  # all: from the beginning again
            shutil.rmtree(course.graded)
        command = course.start("grade", ASSIGNMENT, "--jobs", "2")
        reader = threading.Thread(target=command.communicate, daemon=True)
        reader.start()
        kills += kill_now_and_then(command, random_, KILLS - kills)
        reader.join(600)
        assert command.poll() is not None
        lost = unexpected(course.members, booked(course.root))
        assert [line for line in lost if " has None of " not in line] == []
    command = course.start("grade", ASSIGNMENT, "--jobs", "2")
    said, _ = command.communicate(timeout=1200)
    assert command.returncode == 0, said
    assert unexpected(course.members, booked(course.root)) == [], said
    print(f"{kills} kills in {rounds} rounds")
