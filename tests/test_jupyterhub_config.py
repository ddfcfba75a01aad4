"""The hub's configuration names an account that is missing; the test needs no hub."""

import asyncio
import sys
import types

import pytest
from traitlets.config import Config

from tests.helpers import ROOT

CONFIG = ROOT / "docs" / "jupyterhub" / "jupyterhub_config.py"


class Machine:
    """Stands for JupyterHub's log-in on a machine with one account."""

    def system_user_exists(self, user) -> bool:
        return bool(user.name == "instructor1")

    async def add_user(self, user) -> None:
        user.added = True


def test_a_grader_without_an_account_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    auth = types.SimpleNamespace(PAMAuthenticator=Machine)
    monkeypatch.setitem(sys.modules, "jupyterhub", types.SimpleNamespace(auth=auth))
    monkeypatch.setitem(sys.modules, "jupyterhub.auth", auth)
    monkeypatch.setenv("COURSE", str(ROOT))
    config = Config()
    names = {"get_config": lambda: config, "__file__": str(CONFIG)}
    exec(compile(CONFIG.read_text(), CONFIG, "exec"), names)
    hub = config.JupyterHub.authenticator_class()
    grader = types.SimpleNamespace(name="instructor1")
    asyncio.run(hub.add_user(grader))
    assert grader.added and config.JupyterHub.services[0]["user"] == ROOT.owner()
    with pytest.raises(SystemExit, match=r"no account instructor2, .* one of the graders in"):
        asyncio.run(hub.add_user(types.SimpleNamespace(name="instructor2")))
