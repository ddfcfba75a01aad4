"""The way to temporary folders is open to the sandbox's user; one warm sandbox for many tests."""

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


@pytest.fixture(scope="session", autouse=True)
def alembic_is_asked_once() -> Iterator[None]:
    """For every new gradebook nbgrader runs a program of 2 s that always says the same.

    Where commands of nbgrader run in processes of their own, they ask it themselves.
    """
    from nbgrader import api

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "get_alembic_version", functools.cache(api.get_alembic_version))
        yield


@pytest.fixture(scope="module")
def place() -> Iterator[SandboxedPlace]:
    with SandboxedPlace(masked=("course_lib.sharding",)) as place:
        yield place
