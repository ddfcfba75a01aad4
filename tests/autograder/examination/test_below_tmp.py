"""The course or its Python may lie below /tmp or /dev/shm, where each cell has files of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from autograder.examination.submission import Submission
from autograder.passes import examine
from autograder.sandbox.look import ready
from autograder.sandbox.mounts import Mount, python_mounts
from autograder.sandbox.place import SandboxedPlace
from autograder.sandbox.unavailable import SandboxUnavailable
from tests.helpers import ROOT

PACKAGE = "/tmp/a checkout\nof 中文/lib"
ALONE = "/dev/shm/deep/below/file.txt"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SandboxedPlace]:
    """A sandbox that shows a package below /tmp, in which something is hidden, and a file."""
    folder = tmp_path_factory.mktemp("lib")
    folder.chmod(0o755)
    (folder / "hidden").mkdir()
    (folder / "hidden" / "secret.txt").write_text("42")
    (folder / "shown_package.py").write_text("def three():\n    return 3\n")
    (folder / "late.py").write_text("VALUE = 4\n")
    (folder / "data.txt").write_text("a file of the host")
    shown = [
        Mount(PACKAGE, folder),
        Mount(f"{PACKAGE}/hidden"),
        Mount(ALONE, folder / "data.txt"),
    ]
    with SandboxedPlace(more=shown) as place:
        ready(place)
        yield place


@pytest.fixture
def submission(place: SandboxedPlace) -> Iterator[Submission]:
    with Submission(place) as submission:
        yield submission


def program(function: object, mine: object) -> object:
    return function(mine)  # type: ignore[operator]


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

    def not_ready(_: SandboxedPlace) -> None:
        raise SandboxUnavailable("There is no room.", advice="")

    monkeypatch.setattr(examine, "ready", not_ready)
    monkeypatch.setattr(examine, "_warm", {})
    with pytest.raises(SystemExit, match=r"^nbgrader autograde: There is no room\.$"):
        examine.before_any("one", "*", [])
