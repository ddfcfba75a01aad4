"""What `autograder doctor` says of machines that cannot grade."""

from __future__ import annotations

import argparse
import shutil
import sys
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from autograder.commands import doctor
from autograder.course import load_config
from autograder.passes import self_test
from autograder.sandbox import bubblewrap
from autograder.sandbox.sandbox import Sandbox
from tests.helpers import ROOT
from tests.helpers.course_folders import copy_assignment, needs_sources

pytestmark = pytest.mark.filterwarnings("ignore")


@needs_sources
@pytest.mark.skipif(sys.platform != "linux", reason="nothing is graded elsewhere")
def test_with_grading_it_grades(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert doctor.run(ROOT, argparse.Namespace()) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "got the right points" in printed
    config = load_config(ROOT)
    for fact in (ROOT, ROOT / "grading", config.Exchange.root, f"torch {version('torch')}"):
        assert str(fact) in printed


@needs_sources
@pytest.mark.skipif(sys.platform != "linux", reason="nothing is graded elsewhere")
def test_a_machine_that_grades_wrongly_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "wrong_points", lambda *_: "x got 3 of 4")
    monkeypatch.setattr(Sandbox, "close", lambda _: None)  # it serves the other tests
    finding = doctor.graded(ROOT)
    assert "x got 3 of 4. So this machine, or the check, is broken" in finding.summary
    assert "do not grade here" in finding.advice


def test_without_solutions_it_says_what_was_not_tried(tmp_path: Path) -> None:
    (tmp_path / "nbgrader_config.py").write_bytes((ROOT / "nbgrader_config.py").read_bytes())
    finding = doctor.graded(tmp_path)
    assert not finding.advice and "not tested" in finding.summary


def test_off_linux_there_is_no_grading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "sys", types.SimpleNamespace(platform="darwin"))
    bubblewrap.probe.cache_clear()
    assert doctor.bubblewrap(ROOT).summary == "The sandbox needs Linux."


@needs_sources
@pytest.mark.skipif(sys.platform != "linux", reason="nothing is graded elsewhere")
def test_it_grades_the_assignments_of_the_course_folder(tmp_path: Path, monkeypatch) -> None:
    """The course may be installed elsewhere, without hidden cases."""
    monkeypatch.setattr(doctor.SelfTest, "run", lambda _: None)
    (tmp_path / "nbgrader_config.py").write_bytes((ROOT / "nbgrader_config.py").read_bytes())
    shutil.copytree(copy_assignment("02_data_parallel_sgd", tmp_path), tmp_path / "instructor/9_x")
    shutil.rmtree(tmp_path / "instructor/02_data_parallel_sgd")
    assert "9_x" in doctor.graded(tmp_path).summary
