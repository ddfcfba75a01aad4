"""The ranks start as the notebook around them wants: with its GPUs."""

from unittest.mock import create_autospec

from course_lib.ranks import Ranks
from course_lib.ranks.processes import fork_client
from course_lib.ranks.processes.fork_client import ForkServer


def test_gpus_that_the_notebook_chooses_late_are_those_of_the_ranks(monkeypatch):
    """Which a rank must know when it opens CUDA, before its first call."""
    fork_client.shared_server().wait_until_ready()
    fork = create_autospec(ForkServer.fork, side_effect=ForkServer.fork)
    monkeypatch.setattr(ForkServer, "fork", fork)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    with Ranks(2, on="cpu") as ranks:
        ranks.start()
    configs = [call.args[2] for call in fork.call_args_list]
    chosen = [config["environment"]["CUDA_VISIBLE_DEVICES"] for config in configs]
    assert chosen == ["1,3", "1,3"]
