"""The ranks start as the notebook around them wants: early, and with its GPUs."""

from typing import Any

import pytest

from course_lib.ranks import Ranks
from course_lib.ranks.processes import fork_client
from course_lib.ranks.processes.fork_client import ForkServer
from tests.helpers.kernels import descendants, kernel, wait_until_gone


def test_a_notebook_starts_the_fork_server_when_it_imports_the_ranks() -> None:
    with kernel() as fresh:
        fresh.run("import course_lib.ranks")
        server = descendants(fresh.pid)[0]
        fresh.run("from course_lib.ranks import Ranks\nranks = Ranks(2)\nranks.run(lambda: 1)")
        below = descendants(fresh.pid)
        assert below[0] == server
        assert len(descendants(server)) == 3  # the ranks, and what cleans up after them
        assert len(below) == 4
    assert wait_until_gone(below) == []


def test_gpus_that_the_notebook_chooses_late_are_those_of_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which a rank must know when it opens CUDA, before its first call."""
    fork_client.shared_server().wait_until_ready()
    configs = []
    fork = ForkServer.fork

    def note(server: ForkServer, function: str, config: dict[str, Any], *more: Any) -> int:
        configs.append(config)
        return fork(server, function, config, *more)

    monkeypatch.setattr(ForkServer, "fork", note)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    with Ranks(2, on="cpu") as ranks:
        ranks.start()
    told = [config["environment"]["CUDA_VISIBLE_DEVICES"] for config in configs]
    assert told == ["1,3", "1,3"]
