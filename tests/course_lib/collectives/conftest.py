"""The network of simulated ranks on which collectives are tested: slow enough to be told apart."""

import pytest

from course_lib.ranks import Network


@pytest.fixture(scope="module")
def network() -> Network:
    return Network(latency=1e-3, bandwidth=1e8)
