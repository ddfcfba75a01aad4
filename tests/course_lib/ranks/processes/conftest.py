"""What several tests of rank processes share."""

import pytest

from course_lib.ranks.processes import fork_client


@pytest.fixture
def own_server(monkeypatch):
    """Fork this test's ranks from a server of its own, which loads little and ends with it."""
    monkeypatch.setattr(fork_client, "NEEDED", fork_client.NEEDED[:4])
    monkeypatch.setattr(fork_client, "LATER", ())
    monkeypatch.setattr(fork_client, "_preloaded", {})
    monkeypatch.setattr(fork_client, "_server", None)
    yield
    if fork_client._server is not None:
        fork_client._server.close()
