"""The doctor's messages on machines that lack something."""

import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from course_lib.learner import doctor
from course_lib.learner.__main__ import main


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_this_machine_can_take_the_course(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """All looks but the one that starts processes, which the tests of ranks do all the time."""
    looks = tuple(look for look in doctor.LOOKS if look is not doctor.real)
    monkeypatch.setattr(doctor, "LOOKS", looks)
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "Ready: lectures and checks work here" in said and "✗" not in said


def test_an_incomplete_installation_is_told(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor.metadata.version

    def version(name: str) -> str:
        if name == "cloudpickle":
            raise doctor.metadata.PackageNotFoundError
        return "0.1" if name == "matplotlib" else real(name)

    monkeypatch.setattr(doctor.metadata, "version", version)
    monkeypatch.setitem(sys.modules, "torch", None)
    problems = doctor.print_all([doctor.packages, doctor.torch_and_gpus])
    assert problems == ["packages", "torch and gpus"]
    packages, advice, torch, same_advice = capsys.readouterr().out.splitlines()
    assert "cloudpickle is missing" in packages and "matplotlib is 0.1" in packages
    assert "make" in advice and "pip install" in advice
    assert "torch" in torch and same_advice == advice


@pytest.mark.parametrize(
    ("cuda", "driver", "words"),
    [
        (None, False, "no GPU, and none is needed"),
        (None, True, "install PyPI's torch"),
        ("13.0", True, "update NVIDIA's driver"),
    ],
)
def test_gpus_that_torch_does_not_see_cost_no_more_than_speed(monkeypatch, cuda, driver, words):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(Path, "glob", lambda path, pattern: iter([path] if driver else []))
    found = doctor.torch_and_gpus()
    assert words in found.summary + found.advice
    assert bool(found.advice) is driver and not (found.advice and found.needed)


def test_ranks_that_cannot_make_groups_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS before every group connected at once."""

    def refuse() -> None:
        raise RuntimeError("UV transport does not support lazy init")

    in_this_process = MagicMock()
    in_this_process().__enter__().run = lambda function: [function()]
    monkeypatch.setattr("course_lib.ranks.Ranks", in_this_process)
    monkeypatch.setattr("torch.distributed.new_group", refuse)
    finding = doctor.real()
    assert finding.needed and finding.advice and "lazy init" in finding.summary
