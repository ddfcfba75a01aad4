"""The sandbox's user may enter temporary folders; one sandbox, one course, one class serve many."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autograder.__main__ import main
from autograder.course import Settings
from autograder.passes import examine
from autograder.passes.examine import Exam
from autograder.sandbox.sandbox import Sandbox
from tests.helpers.whole_class import course_of, graded_with_failures, once


@pytest.fixture(scope="session", autouse=True)
def temporary_folders_can_be_entered(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Pytest closes its folder to all others, and a parallel worker's lies one deeper."""
    folder = tmp_path_factory.getbasetemp()
    while folder.stat().st_uid == os.geteuid() and str(folder) != tempfile.gettempdir():
        folder.chmod(folder.stat().st_mode | 0o055)
        folder = folder.parent


@pytest.fixture(scope="module", autouse=True)
def path_is_kept() -> Iterator[None]:
    """Take back the folder that nbgrader_config.py puts in front of PATH."""
    before = os.environ["PATH"]
    yield
    os.environ["PATH"] = before


@pytest.fixture(scope="session", autouse=True)
def alembic_is_asked_here() -> Iterator[None]:
    """Ask alembic for its version in this process; nbgrader starts one for every new gradebook.

    That takes 2 s. nbgrader commands in processes of their own still do so.
    """
    from alembic.config import Config
    from alembic.script import ScriptDirectory
    from nbgrader import api

    def version() -> str | None:
        with api._temp_alembic_ini("sqlite://") as settings:
            return ScriptDirectory.from_config(Config(settings)).get_current_head()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "get_alembic_version", version)
        yield


@pytest.fixture
def autograder(monkeypatch, capsys):
    """Return a function that runs a command on a course: its exit status, and what it printed."""

    def run(course: Path, *arguments: str) -> tuple[int, str]:
        command = ["autograder", *arguments, "--course", str(course)]
        monkeypatch.setattr(sys, "argv", command)
        try:
            status = main()
        except SystemExit as end:  # argparse's
            status = int(end.code or 0)
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return run


@pytest.fixture(scope="session")
def place() -> Iterator[Sandbox]:
    """The sandbox of all tests that do not break theirs, and of the passes for assignment 02.

    To start one takes seconds.
    """
    with Exam({}, ("course_lib.sharding",)).sandbox(Settings()) as place:
        yield place


@pytest.fixture(scope="session", autouse=True)
def sandboxes_are_closed() -> Iterator[None]:
    """Close the sandbox that the passes keep for the next submission of an assignment."""
    yield
    for sandbox in examine._warm.values():
        sandbox.close()


@pytest.fixture(scope="session")
def released_course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A course with two tasks and few cases, released; only to be copied."""
    return once(tmp_path_factory, "released", course_of)


@pytest.fixture(scope="session")
def graded_course(tmp_path_factory: pytest.TempPathFactory, released_course: Path) -> Path:
    """The course with a class of ten, graded with failures on the way; only to be copied."""

    def grade(folder: Path) -> None:
        shutil.copytree(released_course, folder, dirs_exist_ok=True)
        graded_with_failures(folder)

    return once(tmp_path_factory, "graded", grade)


@pytest.fixture(scope="module")
def copy_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Return a copy of a shared course, for the tests of a file."""
    return lambda course: shutil.copytree(
        course, tmp_path_factory.mktemp("a course") / "course", symlinks=True
    )
