"""Places at which a course and its Python are refused, before anything is graded."""

from __future__ import annotations

import sys

import pytest

from autograder.errors import SandboxUnavailable
from autograder.passes import examine
from autograder.sandbox.mounts import python_mounts
from autograder.sandbox.sandbox import Sandbox
from tests.helpers import ROOT


@pytest.mark.parametrize("where", ["/tmp", "/dev/shm", "/var/tmp", "/dev"])
def test_a_python_that_is_the_folder_of_everybody_is_refused(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", where)
    with pytest.raises(SandboxUnavailable, match="student code would see these"):
        python_mounts()


def test_a_course_in_its_own_virtual_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sandbox would show instructor/."""
    monkeypatch.setattr(sys, "prefix", str(ROOT))
    with pytest.raises(SandboxUnavailable, match="are one folder"):
        python_mounts()


def test_plain_nbgrader_says_it_once_and_grades_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only an exit makes its hook stop; else each student would get a traceback."""

    def not_ready(_: Sandbox) -> None:
        raise SandboxUnavailable("There is no room.", advice="")

    monkeypatch.setattr(Sandbox, "make_ready", not_ready)
    monkeypatch.setattr(examine, "_warm", {})
    with pytest.raises(SystemExit, match=r"^nbgrader autograde: There is no room\.$"):
        examine.before_any("one", "*", [])
