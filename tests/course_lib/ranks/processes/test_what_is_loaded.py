"""The fork server loads modules before and after the first ranks, and ends no import midway."""

import importlib
import os
import sys
import time

import pytest
import torch.distributed as dist

from course_lib.ranks import RankError, Ranks, RankTimeout
from course_lib.ranks.processes import fork_client, team
from tests.helpers import ROOT

FIRST, LAST, SLOW = "first_helper", "last_helper", "slow_helper"


def loaded() -> tuple[bool, bool]:
    """Return which of the two modules this rank had when it began."""
    return FIRST in sys.modules, LAST in sys.modules


@pytest.mark.large
def test_a_machine_without_what_few_ranks_need_has_ranks(own_server, tmp_path, monkeypatch):
    """Such as one with a GPU and PyTorch, and without IPython."""
    for name in (FIRST, LAST):
        (tmp_path / f"{name}.py").touch()
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    needed = (*fork_client.NEEDED, "no_such_module", FIRST)
    monkeypatch.setattr(fork_client, "NEEDED", needed)
    monkeypatch.setattr(fork_client, "LATER", ("neither_this_one", LAST))
    with Ranks(2, on="cpu", timeout=60) as ranks:
        server = fork_client.shared_server()
        assert ranks.run(loaded) == [(True, False)] * 2
        time.sleep(4)  # the server has nothing to do, and loads what may be needed
    with Ranks(2, on="cpu", timeout=60) as ranks:
        assert ranks.run(loaded) == [(True, True)] * 2
        assert fork_client.shared_server() is server


def import_or_fail(name: str):
    """Import a slow module on rank 0 while rank 1 fails."""
    if dist.get_rank() == 1:
        raise LookupError("gone")
    return importlib.import_module(name)


@pytest.fixture
def slow_module(tmp_path, monkeypatch):
    """A module whose import takes 0.6 s."""
    text = "import threading\nthreading.Event().wait(0.6)\nWHOLE = True\n"
    (tmp_path / f"{SLOW}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))


def is_whole() -> bool | None:
    return getattr(sys.modules.get(SLOW), "WHOLE", None)


def test_an_import_is_not_given_up_in_the_middle(slow_module, monkeypatch):
    monkeypatch.setattr(team, "_GRACE", 0.1)
    monkeypatch.setattr(team, "_GIVE_UP_LIMIT", 20)
    with Ranks(2, on="cpu", timeout=60) as ranks:
        before = ranks.run(os.getpid)
        with pytest.raises(RankError, match="LookupError: gone"):
            ranks.run(import_or_fail, SLOW)
        assert ranks.run(is_whole) == [True, None]
        assert ranks.run(os.getpid) == before


def test_a_time_limit_of_simulated_ranks_ends_no_import(slow_module):
    with Ranks(1, on="simulated", timeout=60) as ranks:
        assert ranks.run(is_whole) == [None]
        ranks.timeout = 0.2
        with pytest.raises(RankTimeout):
            ranks.run(importlib.import_module, SLOW)
        ranks.timeout = 60
        assert ranks.run(is_whole) == [True]
