"""With several clones, a class is graded by the code of the clone whose command is given."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autograder.commands.demo import ASSIGNMENT
from tests.helpers import ROOT
from tests.helpers.course_folders import needs_sources
from tests.helpers.whole_class import hand_in, small_class


@pytest.fixture(scope="module")
def clone(released_course: Path, copy_of: Callable[[Path], Path]) -> Path:
    """A clone with a class of one, beside the installed clone."""
    root = copy_of(released_course)
    for package in ("course_lib", "autograder"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, root / package, ignore=ignored)
    hand_in(root, {"untouched": small_class(root)["untouched"]})
    return root


@needs_sources
@pytest.mark.large
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "installed",
    [
        pytest.param(False, id="the command of the clone"),
        pytest.param(True, id="the installed command"),
    ],
)
def test_another_clone_than_the_installed_one(clone: Path, installed: bool) -> None:
    """Both commands are given in the clone's folder."""
    if installed:  # the other way round, what lies in the folder would not even start
        (clone / "autograder" / "pool" / "worker.py").write_text("raise SystemExit('not this one')")
    command = [sys.executable, *(["-P"] if installed else []), "-m", "autograder", "grade"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*command, ASSIGNMENT, "--jobs", "1"],
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "graded: 1 (0 of them unchanged" in done.stdout
    assert "could not be graded: 0" in done.stdout
    shutil.rmtree(clone / "grading" / "graded")
