"""On an odd machine a class is graded right.

`examination/test_refused_places.py` has the machines on which nobody is graded.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from autograder.commands.demo import ASSIGNMENT
from tests.helpers import ROOT
from tests.helpers.course_folders import needs_sources
from tests.helpers.whole_class import booked, hand_in, small_class, unexpected

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
USER = "61999"
"""A user that no machine has, and that no sandbox takes."""
NAMES = ("right", "sum")
"""The class: one right submission, one wrong."""


@pytest.fixture
def odd() -> Iterator[Path]:
    """A folder that others may enter; pytest shuts its own to others whenever it is started."""
    with tempfile.TemporaryDirectory(prefix="odd-machines-") as place:
        os.chmod(place, 0o755)
        folder = Path(place, "a space, quo'te, 中文, line\nend")
        folder.mkdir()
        yield folder


@needs_sources
@pytest.mark.large
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can show folders at other places")
def test_an_ordinary_user_in_a_folder_with_all_kinds_of_letters(released_course, odd):
    """The course, its packages and its Python lie below /tmp; the environment is nearly empty.

    Folders are moved by bind mounts in a mount namespace of the command's own.
    """
    course = shutil.copytree(released_course, odd / "course", symlinks=True)
    members = {name: member for name, member in small_class(course).items() if name in NAMES}
    hand_in(course, members)
    base, venv, clone = Path(sys.base_prefix), odd / "venv", odd / "clone"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/python").symlink_to(base / "bin" / f"python{VERSION}")
    (venv / "pyvenv.cfg").write_text(f"home = {base / 'bin'}\n")
    packages = venv / "lib" / f"python{VERSION}" / "site-packages"
    script = ["set -e"]

    def shows(source: str | Path, at: Path) -> None:
        script.append(shlex.join(["mkdir", "-p", str(at)]))
        script.append(shlex.join(["mount", "--bind", str(source), str(at)]))

    shows(sysconfig.get_path("purelib"), packages)
    for package in ("course_lib", "autograder"):
        shows(ROOT / package, clone / package)
    above = [folder for folder in base.parents if not folder.stat().st_mode & 0o001]
    if above:  # such as /root, which no ordinary user may enter
        shows(base, odd / "held")
        script.append(
            shlex.join(["mount", "-t", "tmpfs", "-o", "mode=755", "none", str(above[-1])])
        )
        shows(odd / "held", base)
    script.append(shlex.join(["chown", "-R", f"{USER}:{USER}", str(course)]))
    user = ["setpriv", "--reuid", USER, "--regid", USER, "--clear-groups"]
    command = ["-P", "-m", "autograder", "grade", ASSIGNMENT, "--jobs", "1"]
    grade = [*user, str(venv / "bin/python"), *command, "--course", str(course)]
    process = subprocess.run(
        ["unshare", "-m", "sh", "-c", "\n".join([*script, f"exec {shlex.join(grade)}"])],
        cwd="/",
        env={
            **{"PATH": os.environ["PATH"], "PYTHONPATH": str(clone)},
            **{"HOME": "/nonexistent", "TMPDIR": "/no/such/folder"},
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=300,
    )
    assert process.returncode == 0, process.stdout
    assert unexpected(members, booked(course)) == [], process.stdout
