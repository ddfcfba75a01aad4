"""The desk that this course makes: links, checks, nothing given away, and JupyterLab on it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest

from course_lib.learner._desk import READ_ONLY, WORKED_IN, refresh
from course_lib.learner.lab import SETTINGS, environment
from tests.helpers.course_folders import ROOT
from tests.helpers.notebook_rules import broken_links, prose_cells

START_SECONDS = 90


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a student's") / "desk"
    assert refresh(ROOT, folder) == []
    return folder


def test_every_link_of_every_notebook_leads_to_a_file_on_the_desk(desk: Path) -> None:
    """In JupyterLab nothing above its root can be opened, and no folder by a link."""
    seen = 0
    for path in sorted(desk.rglob("*.ipynb")):
        for _, text, cell in prose_cells(nbformat.read(path, as_version=4)):
            assert not list(broken_links(text, path.parent, set(cell.get("attachments", {}))))
            for target in re.findall(r"\]\((?![a-z]+:|#)([^)#]+)", text):
                place = Path(os.path.normpath(path.parent / target))
                assert place.is_relative_to(desk) and place.is_file(), f"{path.name}: {target}"
                seen += 1
    assert seen >= 4, "lectures link to one another, to modules and to assignments"


def test_lectures_and_assignments_are_all_there_and_spoil_nothing(desk: Path) -> None:
    for pattern in ("lectures/*.ipynb", "assignments/*/*.ipynb", "assignments/*/*.py"):
        there = sorted(path.relative_to(ROOT) for path in ROOT.glob(pattern))
        assert there and there == sorted(path.relative_to(desk) for path in desk.glob(pattern))
    for path in desk.rglob("*.ipynb"):
        for cell in nbformat.read(path, as_version=4).cells:
            assert not cell.get("outputs") and cell.get("execution_count") is None
    assert not list(desk.rglob("hidden.py")) + list(desk.rglob("mutants.py"))


def test_the_courses_settings_stand_before_those_the_user_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", "/mine")
    assert environment()["JUPYTER_CONFIG_PATH"] == f"{SETTINGS}{os.pathsep}/mine"
    monkeypatch.delenv("JUPYTER_CONFIG_PATH")
    assert environment()["JUPYTER_CONFIG_PATH"] == str(SETTINGS)
    assert environment()["PATH"].startswith(f"{Path(sys.executable).parent}{os.pathsep}")


@pytest.fixture(scope="module")
def get(desk: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Start JupyterLab as `make lab` does, and return what gets a page from it."""
    home = tmp_path_factory.mktemp("jupyter")
    places = {f"JUPYTER_{name}_DIR": str(home / name) for name in ("CONFIG", "RUNTIME")}
    options = ["--no-browser", "--ip=127.0.0.1", "--port=0", "--allow-root"]
    with open(home / "log", "w+") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "course_lib.learner", "lab", "--desk", desk, *options],
            env={**os.environ, **places},
            stdout=log,
            stderr=log,
        )
        try:
            found = home / "RUNTIME" / f"jpserver-{server.pid}.json"  # exec keeps the number
            deadline, told = time.monotonic() + START_SECONDS, None
            while told is None:
                assert server.poll() is None and time.monotonic() < deadline, Path(
                    log.name
                ).read_text()
                with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
                    told = json.loads(found.read_text())
                time.sleep(0.1)
            assert told["root_dir"] == str(desk)
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

            def page(path: str) -> str:
                request = urllib.request.Request(
                    told["url"] + path, headers={"Authorization": f"token {told['token']}"}
                )
                with opener.open(request, timeout=START_SECONDS) as answer:
                    text: str = answer.read().decode()
                    return text

            yield page
        finally:
            server.terminate()
            server.wait(START_SECONDS)


def test_jupyterlab_opens_on_the_desk(get: Callable[[str], str]) -> None:
    shown = json.loads(get("api/contents/"))["content"]
    assert {entry["name"] for entry in shown} == {*WORKED_IN, *READ_ONLY}
    module = json.loads(get("api/contents/course_lib/sgd.py"))
    assert "def sgd_step" in module["content"]
