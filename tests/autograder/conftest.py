"""The sandbox's user may enter temporary folders; one warm sandbox serves many tests."""

import functools
import os
import tempfile
from collections.abc import Iterator

import pytest

from autograder.sandbox.place import SandboxedPlace


@pytest.fixture(scope="module", autouse=True)
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
def alembic_is_asked_once() -> Iterator[None]:
    """Keep the answer of a program that nbgrader runs for 2 s for every new gradebook.

    nbgrader commands in processes of their own still run the program themselves.
    """
    from nbgrader import api

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "get_alembic_version", functools.cache(api.get_alembic_version))
        yield


@pytest.fixture(scope="module")
def place() -> Iterator[SandboxedPlace]:
    with SandboxedPlace(masked=("course_lib.sharding",)) as place:
        yield place
