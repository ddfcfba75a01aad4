"""A class of three hundred, with everything that people and programs do to a grader."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
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
    unexpected,
)

LOOK_EVERY, TELL_EVERY = 5.0, 30.0
"""Seconds."""


def memory(process: psutil.Process) -> float:
    """Return the GiB of a process and all below it; shared pages count once."""
    total = 0.0
    for each in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            total += each.memory_full_info().pss / 2**30
    return total


class Clock:
    """Prints its lines at once, so that also a run that is cut short has shown something."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    @property
    def minutes(self) -> float:
        return (time.monotonic() - self._start) / 60

    def say(self, words: str) -> None:
        print(f"{self.minutes:5.1f} min  {words}", flush=True)


def followed(course: Course, clock: Clock, said: Path, *arguments: str) -> tuple[str, float]:
    """Run a command to its end; return its output, and the most GiB that it used."""
    begun, told, peak = time.time_ns(), 0.0, 0.0
    with said.open("w") as file:
        process = course.start(*arguments, out=file)
        while process.poll() is None:
            with contextlib.suppress(psutil.Error):
                peak = max(peak, memory(psutil.Process(process.pid)))
            if time.monotonic() - told > TELL_EVERY:
                told = time.monotonic()
                done = sum(when >= begun for when in course.times().values())
                there = len(course.verdicts())
                clock.say(f"{arguments[0]}: {done} graded by this command, {there} verdicts")
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_EVERY)
    words = said.read_text()
    assert process.returncode == 0, words[-3000:]
    return words, peak


@needs_sources
@pytest.mark.large
@pytest.mark.filterwarnings("ignore")  # nbgrader's, and what it stands on
@pytest.mark.timeout(8 * 3600)
def test_a_class_of_three_hundred(tmp_path: Path) -> None:
    """Survive two kills, grade all as expected, and grade all again with the same points.

    CLASS_SIZE sets another number than 300. CLASS_AGAIN sets how many, drawn at random, are
    examined a second time. -s shows progress and measurements.
    """
    count = int(os.environ.get("CLASS_SIZE", "300"))
    clock = Clock()
    course = Course(course_of(tmp_path / "course"), {})
    course.members = large_class(course.root, count)
    hand_in(course.root, course.members)
    expected = sorted(name for name, member in course.members.items() if member.graded)
    clock.say(f"{count} have handed in, {len(expected)} of them a notebook")
    start = clock.minutes
    for part in (4, 2):
        course.killed("grade", ASSIGNMENT, at=lambda: len(course.verdicts()) >= count // part)  # noqa: B023
        clock.say(f"killed, with {len(course.verdicts())} verdicts; nothing outlived it")
    _, peak = followed(course, clock, tmp_path / "said", "grade", ASSIGNMENT)
    took = clock.minutes - start
    first, graded = booked(course.root), len(course.verdicts())
    told = {
        "graded": graded,
        "minutes": round(took, 1),
        "per minute, kills and booking included": round(graded / took, 1),
        "peak memory, GiB": round(peak, 2),
    }
    clock.say(json.dumps(told))
    assert graded == len(expected)
    assert unexpected(course.members, first) == []
    clock.say("all are graded and booked with the points that they should have")
    again = min(len(expected), int(os.environ.get("CLASS_AGAIN", count)))
    chosen = sorted(random.sample(expected, again)) if again < len(expected) else expected
    who = [f"--student={name}" for name in chosen] if chosen != expected else []
    words, _ = followed(
        course, clock, tmp_path / "again", "regrade", ASSIGNMENT, "--all", "--book", *who
    )
    assert f"0 gain, 0 lose, {again} keep their points" in words, words[-3000:]
    assert booked(course.root) == first
    clock.say(f"{again} examined again, with the same points")
