"""Places at which a course and its Python are refused, before anything is graded."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from types import ModuleType

import pytest

from autograder.course import Settings, find_course
from autograder.errors import CommandFailed, SandboxUnavailable
from autograder.inside import look
from autograder.inside.scratch import HOME
from autograder.passes import autograde, examine
from autograder.sandbox import mounts
from autograder.sandbox.mounts import python_mounts
from autograder.sandbox.sandbox import Sandbox
from autograder.sandbox.user import make_sure_of_uids
from course_lib.ranks.wire import receive
from tests.helpers import ROOT
from tests.helpers.course_folders import SOURCES, needs_sources


@pytest.mark.parametrize(
    ("prefix", "reason"),
    [
        *(
            (path, "student code would see these")
            for path in ("/tmp", "/dev/shm", "/var/tmp", "/dev")
        ),
        (str(ROOT), "are one folder"),  # the sandbox would show instructor/
    ],
)
def test_a_python_in_the_folder_of_all_or_of_the_course_is_refused(prefix, reason, monkeypatch):
    monkeypatch.setattr(sys, "prefix", prefix)
    with pytest.raises(SandboxUnavailable, match=reason):
        python_mounts()


def test_a_course_at_a_path_that_python_would_split_is_refused(monkeypatch):
    monkeypatch.setattr(mounts, "course_package", lambda: Path("/home/a:b/course_lib"))
    with pytest.raises(SandboxUnavailable, match="contains a ':'"):
        python_mounts()


@pytest.mark.parametrize("name", ["per%20cent", "star*"])
def test_a_course_at_a_path_that_nbgrader_would_interpret_is_refused(name, tmp_path):
    (tmp_path / name).mkdir()
    (tmp_path / name / "nbgrader_config.py").touch()
    with pytest.raises(CommandFailed, match="nbgrader cannot work in"):
        find_course(tmp_path / name)


def test_a_root_without_the_uids_of_cells_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_: "0 1000 1\n")
    with pytest.raises(SandboxUnavailable, match="in a user namespace without the uids"):
        make_sure_of_uids()


@needs_sources
def test_a_sandbox_that_is_not_ready_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Sandbox] = []

    def sees(sandbox: Sandbox) -> str:
        started.append(sandbox)
        return "may not read /root/torch"

    monkeypatch.setattr(Sandbox, "_look_from_a_cell", sees)
    monkeypatch.setattr(examine, "_warm", {})
    exam = examine.Exam.of(SOURCES / "03_collectives")
    with pytest.raises(SandboxUnavailable, match="may not read /root/torch"):
        exam.sandbox(Settings())
    assert started[0]._server is None and started[0]._log is None


def test_plain_nbgrader_says_it_once_and_grades_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only an exit makes its hook stop; else each student would get a traceback."""

    def not_ready(_: Sandbox) -> None:
        raise SandboxUnavailable("There is no room.")

    monkeypatch.setattr(Sandbox, "make_ready", not_ready)
    autograde._make_sure_of_a_sandbox.cache_clear()
    with pytest.raises(SystemExit, match=r"^nbgrader autograde: There is no room\.$"):
        autograde.before_any("one", "*", [])


def test_what_a_module_has_made_for_itself_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.8 makes a folder when it is imported; a cell has a /tmp of its own."""
    in_home, lost = f"{HOME}/made when imported/made.py", "/etc/no such folder/lost.py"
    for name, file in (("made", in_home), ("lost", lost)):
        monkeypatch.setitem(sys.modules, name, module := ModuleType(name))
        module.__file__ = file
    ours, cell_end = socket.socketpair()
    with ours:
        look.serve([cell_end.detach()], {})
        problem = receive(ours)
    assert "may not read these files" in problem and lost in problem and in_home not in problem
