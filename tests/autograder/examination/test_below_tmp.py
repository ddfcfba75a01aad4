"""The course or its Python may lie below /tmp or /dev/shm, where each cell has files of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from autograder.examination.submission import Submission
from autograder.passes import examine
from autograder.sandbox import place as place_module
from autograder.sandbox.look import ready
from autograder.sandbox.mounts import Mount, python_mounts
from autograder.sandbox.place import SandboxedPlace
from autograder.sandbox.unavailable import SandboxUnavailable
from course_lib.checking import Case, Check, run_check
from tests.helpers import ROOT

PACKAGE = "/tmp/a checkout\nof 中文/lib"
ALONE = "/dev/shm/deep/below/file.txt"
SHOWN = f"""
import os, sys
sys.path.append({PACKAGE!r})
import shown_package
"""


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


def printed(submission: Submission, source: str) -> str:
    outcome = submission.run_cell(source)
    assert not outcome.error, outcome
    return outcome.stdout.strip()


def test_what_the_sandbox_shows_there_a_cell_sees_and_nothing_else(submission: Submission) -> None:
    assert printed(submission, f"{SHOWN}print(shown_package.three())") == "3"
    assert printed(submission, "import late; print(late.VALUE)") == "4"
    assert printed(submission, f"print(open({ALONE!r}).read())") == "a file of the host"
    for folder, mine in (("/tmp", Path(PACKAGE).parts[2]), ("/dev/shm", "deep")):
        lies = [Path(m.target) for m in python_mounts() if Path(m.target).is_relative_to(folder)]
        names = {mine, *(path.relative_to(folder).parts[0] for path in lies)}  # of these tests
        source = f"print(set(os.listdir({folder!r})) - {{'.ipython'}} == {names!r})"
        assert printed(submission, source) == "True"
    assert printed(submission, f"print(os.listdir({PACKAGE!r} + '/hidden'))") == "[]"


def test_only_what_the_student_wrote_there_travels_to_the_ranks(place: SandboxedPlace) -> None:
    """A student's module is sent by value; a module that is shown is imported like any package."""
    source = f"""{SHOWN}
open("/tmp/theirs.py", "w").write("def five():\\n    return 5\\n")
open("/tmp/note.txt", "w").write("six")
import theirs
def total(mine):
    import late
    assert shown_package.__file__.startswith({PACKAGE!r}), shown_package.__file__
    six = len(open("note.txt").read()) + 3
    return mine * 0 + shown_package.three() + late.VALUE + theirs.five() + six
"""
    check = Check("total", program, inputs, judge, (Case("2 ranks", 2),), 20)
    with Submission(place) as submission:
        printed(submission, source)
        report = run_check("t/total", check, submission.runner(), seed="s")
        assert report.passed, report
        packed = submission._take("total")
    assert b"note.txt" in packed and b"theirs.py" in packed
    assert b"data.txt" not in packed and b"late.py" not in packed


def program(function: object, mine: object) -> object:
    return function(mine)  # type: ignore[operator]


def inputs(case: Case, generator: torch.Generator) -> list[torch.Tensor]:
    return [torch.zeros(1) for _ in range(case.world_size)]


def judge(case: Case, inputs: object, outputs: object) -> None:
    assert [int(each) for each in outputs] == [3 + 4 + 5 + 6] * case.world_size  # type: ignore[attr-defined]


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's sandbox has the same user")
@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket")
def test_what_only_root_may_read_is_found_before_anything_is_graded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installation with umask 077: the folder opens, and the packages in it do not."""
    folder = tmp_path / "site-packages"
    (folder / "mine_alone").mkdir(parents=True, mode=0o700)
    folder.chmod(0o755)
    monkeypatch.setattr(place_module, "_path", lambda: f"/exam:{ROOT}:{folder}")
    with SandboxedPlace(more=[Mount(folder, folder)]) as place:
        with pytest.raises(
            SandboxUnavailable, match=r"may not read.*mine_alone.* chmod -R"
        ) as told:
            ready(place)
        assert len(str(told.value).splitlines()) == 1
        (folder / "mine_alone").chmod(0o755)
        ready(place)


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
