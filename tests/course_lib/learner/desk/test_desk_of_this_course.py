"""The desk that this course makes: links, checks, nothing given away, and JupyterLab on it."""

import os
import re
import sys
from pathlib import Path

import nbformat
import pytest

from course_lib.learner._desk import refresh
from course_lib.learner.lab import SETTINGS, environment
from tests.helpers.course_folders import ROOT
from tests.helpers.notebook_rules import broken_links, prose_cells


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
            assert "answer" not in cell.metadata
    assert not list(desk.rglob("hidden.py")) + list(desk.rglob("mutants.py"))


def test_the_courses_settings_stand_before_those_the_user_has(monkeypatch):
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", "/mine")
    assert environment()["JUPYTER_CONFIG_PATH"] == f"{SETTINGS}{os.pathsep}/mine"
    monkeypatch.delenv("JUPYTER_CONFIG_PATH")
    assert environment()["JUPYTER_CONFIG_PATH"] == str(SETTINGS)
    assert environment()["PATH"].startswith(f"{Path(sys.executable).parent}{os.pathsep}")
