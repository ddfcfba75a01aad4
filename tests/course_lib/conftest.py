"""Ranks that tests share: starting them anew for each file would take the time."""

import pytest

from course_lib.ranks.processes.fork_client import preload
from tests.helpers.carriers import ranks_on


@pytest.fixture(scope="session", autouse=True)
def ranks_have_what_tests_import() -> None:
    """Load it once, into the process that ranks are forked from; else each rank imports it."""
    preload(["pytest", "hypothesis"])


@pytest.fixture(scope="session")
def ranks_of():
    """`ranks_of(on, world_size)`: ranks that all tests share; each must leave them in order."""
    return ranks_on
