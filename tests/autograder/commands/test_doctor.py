"""What `autograder doctor` says of machines that cannot grade."""

from __future__ import annotations

import argparse
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from autograder.commands import doctor
from autograder.passes.self_test import KnownSolutions
from autograder.sandbox.sandbox import Sandbox
from tests.helpers import ROOT
from tests.helpers.course_folders import needs_sources


@needs_sources
@pytest.mark.skipif(sys.platform != "linux", reason="nothing is graded elsewhere")
def test_with_grading_it_grades(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert doctor.run(ROOT, argparse.Namespace()) == 0
    assert "got the right points" in " ".join(capsys.readouterr().out.split())


@needs_sources
@pytest.mark.skipif(sys.platform != "linux", reason="nothing is graded elsewhere")
def test_a_machine_that_grades_wrongly_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KnownSolutions, "wrong", lambda *_: "x got 3 of 4")
    monkeypatch.setattr(Sandbox, "close", lambda _: None)  # it serves the other tests
    found = doctor.graded()
    assert "x got 3 of 4. So this machine, or the check, is broken" in found.summary
    assert "do not grade here" in found.advice


def test_without_solutions_it_says_what_was_not_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "find_course", lambda: tmp_path)
    found = doctor.graded()
    assert found.fine and ("not tested" in found.summary or sys.platform != "linux")


def test_off_linux_there_is_no_grading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "sys", types.SimpleNamespace(platform="darwin"))
    for look in (doctor.bubblewrap, doctor.graded):
        assert not look().fine
