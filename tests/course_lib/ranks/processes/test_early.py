"""Ranks that somebody waits for are forked before everything is loaded, and are no worse for it."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from course_lib.ranks import RankError, Ranks
from course_lib.ranks.placement import Placement
from course_lib.ranks.processes import fork_client, team
from tests.helpers import ROOT

FIRST, NEEDED, SLOW = "first_helper", "needed_helper", "slow_helper"


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a fork server of this test's own load a module of this test soon; return its folder."""
    for name in (FIRST, NEEDED):
        (tmp_path / f"{name}.py").write_text("import os\nLOADED_BY = os.getpid()\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    monkeypatch.setattr(fork_client, "NARROW", (*fork_client.NARROW, FIRST))
    monkeypatch.setattr(fork_client, "SOON", (NEEDED,))
    monkeypatch.setattr(fork_client, "LATER", ())
    monkeypatch.setattr(fork_client, "_server", None)
    yield tmp_path
    fork_client.shared_server().close()


def loaded() -> tuple[bool, bool]:
    """Return which of the two modules this rank had when it began."""
    return FIRST in sys.modules, NEEDED in sys.modules


def loaded_by_another(name: str) -> bool:
    """Import a module; return whether it was there when the rank began."""
    import importlib

    return bool(os.getpid() != importlib.import_module(name).LOADED_BY)


@pytest.mark.parametrize("core_each", [True, False])
def test_who_has_a_core_of_its_own_does_not_wait_for_what_is_needed_soon(
    modules: Path, monkeypatch: pytest.MonkeyPatch, core_each: bool
) -> None:
    monkeypatch.setattr(Placement, "core_each", core_each)
    with Ranks(3, on="cpu", timeout=60) as ranks:
        assert ranks.run(loaded) == [(True, not core_each)] * 3
        assert ranks.run(loaded_by_another, NEEDED) == [not core_each] * 3


def test_a_machine_without_what_few_ranks_need_has_ranks(
    modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one with a GPU and PyTorch, and without IPython."""
    monkeypatch.setattr(fork_client, "SOON", ("no_such_module", NEEDED))
    monkeypatch.setattr(fork_client, "LATER", ("neither_this_one",))
    with Ranks(2, on="cpu", timeout=60) as ranks:
        server = fork_client.shared_server()
        time.sleep(3)  # the server has nothing to do, and loads what may be needed
        assert ranks.run(dist.get_rank) == [0, 1]
    with Ranks(2, on="cpu", timeout=60) as ranks:
        assert ranks.run(loaded) == [(True, True)] * 2
        assert fork_client.shared_server() is server


def import_or_fail(name: str) -> Any:
    """Import a slow module on rank 0 while rank 1 fails."""
    import importlib

    if dist.get_rank() == 1:
        raise LookupError("gone")
    return importlib.import_module(name)


def test_an_import_is_not_given_up_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{SLOW}.py").write_text(
        "import time\nuntil = time.monotonic() + 0.6\n"
        "while time.monotonic() < until:\n    pass\nWHOLE = True\n"
    )
    monkeypatch.setattr(team, "_GRACE", 0.1)
    monkeypatch.setattr(team, "_GIVE_UP_LIMIT", 20)
    monkeypatch.syspath_prepend(str(tmp_path))
    with Ranks(2, on="cpu", timeout=60) as ranks:
        before = ranks.run(os.getpid)
        with pytest.raises(RankError, match="LookupError: gone"):
            ranks.run(import_or_fail, SLOW)
        found = ranks.run(lambda: getattr(sys.modules.get("slow_helper"), "WHOLE", None))
        assert (ranks.run(os.getpid), found) == (before, [True, None])
