"""CPU ranks that the tests of several files share."""

import pytest


@pytest.fixture
def ranks(ranks_of, request):
    """Return as many as a file says, by default three."""
    return ranks_of("cpu", getattr(request.module, "K", 3))
