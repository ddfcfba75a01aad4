"""Ranks that tests share: starting them anew for each file would take the time."""

import pytest

from tests.helpers.carriers import ranks_on


@pytest.fixture(scope="session")
def ranks_of():
    """`ranks_of(on, world_size)`: ranks that all tests share; each must leave them in order."""
    return ranks_on
