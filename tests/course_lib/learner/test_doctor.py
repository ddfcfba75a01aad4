"""The doctor's messages on machines that lack something."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import sys
import types
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from course_lib.learner import doctor
from course_lib.learner.__main__ import main
from course_lib.learner.doctor import _machine, _sandbox, _software
from course_lib.learner.doctor._finding import Finding
from course_lib.ranks.placement import share
from tests.helpers.course_folders import needs_sources

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_this_machine_can_take_the_course(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All looks but the one that starts processes, which the tests of ranks do all the time."""
    looks = tuple(look for look in doctor.LOOKS if look is not _machine.real)
    found = list(doctor.findings(looks))
    assert [each for each in found if not each.fine and each.needed_for == "course"] == []
    monkeypatch.setattr(doctor.findings, "__defaults__", (looks,))
    assert main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fine"] and len(told["findings"]) == len(found)
    assert all(each["told"] and each["fine"] == (not each["advice"]) for each in told["findings"])


@pytest.mark.parametrize(
    ("need", "plain", "grading"), [("course", 1, 1), ("grading", 0, 1), ("nothing", 0, 0)]
)
def test_the_exit_status_says_for_what(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, need: Any, plain: int, grading: int
) -> None:
    def look() -> Finding:
        return Finding("thing", "is broken", "mend it", need)

    monkeypatch.setattr(doctor.findings, "__defaults__", ((look, _software.python),))
    monkeypatch.setattr(doctor, "GRADING_LOOKS", ())
    assert main(["doctor"]) == plain
    assert main(["doctor", "--grading"]) == grading
    out = capsys.readouterr().out
    assert out.count("→ mend it") == 2


@needs_sources
@pytest.mark.skipif(sys.platform != "linux", reason="nothing is graded elsewhere")
def test_with_grading_it_grades(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(doctor.findings, "__defaults__", ((),))
    assert main(["doctor", "--grading"]) == 0
    assert "got the right points" in " ".join(capsys.readouterr().out.split())


@needs_sources
@pytest.mark.skipif(sys.platform != "linux", reason="nothing is graded elsewhere")
@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise SystemExit('no such grader')", "the grader ended: no such grader"),
        ("import time; time.sleep(600)", "took more than"),
        (
            "from autograder.passes import self_test as c; K = c.KnownSolutions;"
            "K.wrong = lambda *_: 'x got 3 of 4';"
            "c.SelfTest.run = lambda self: self._examine(K.of(c.Exam.of(self._source),"
            " self._source, self._released)); c.examine_notebook = lambda *_: None; c.main()",
            "x got 3 of 4. So this machine, or the check, is broken",
        ),
    ],
    ids=["ends", "hangs", "gives other points"],
)
def test_a_machine_that_grades_wrongly_is_told(
    monkeypatch: pytest.MonkeyPatch, code: str, words: str
) -> None:
    run = _sandbox.subprocess.run

    def other(command: list[str], **options: Any) -> Any:
        rest = command[command.index("--course") :]
        return run([sys.executable, "-P", "-c", code, *rest], **options)

    monkeypatch.setattr(_sandbox.subprocess, "run", other)
    if "sleep" in code:
        monkeypatch.setattr(_sandbox, "_SELF_TEST_SECONDS", 0.5)
    found = _sandbox.graded()
    assert words in found.told and found.needed_for == "grading"
    assert "do not grade here" in found.advice


def test_without_solutions_it_says_what_was_not_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(_sandbox, "find_course", lambda: tmp_path)
    found = _sandbox.graded()
    assert found.fine and ("not tested" in found.told or sys.platform != "linux")


def test_a_look_that_stumbles_is_a_finding_too() -> None:
    def gpus_of_the_future() -> Finding:
        raise RuntimeError("no such driver")

    (found,) = doctor.findings([gpus_of_the_future])
    assert found.name == "gpus of the future" and "no such driver" in found.told
    assert not found.fine


def test_an_incomplete_installation_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    real = _software.metadata.version

    def version(name: str) -> str:
        if name == "cloudpickle":
            raise _software.metadata.PackageNotFoundError
        return "0.1" if name == "matplotlib" else real(name)

    monkeypatch.setattr(_software.metadata, "version", version)
    found = _software.packages()
    assert "cloudpickle is missing" in found.told and "matplotlib is 0.1" in found.told
    assert "make" in found.advice and "pip install" in found.advice
    monkeypatch.setitem(sys.modules, "torch", None)
    assert _software.torch_build().advice and _machine.simulated().advice and _machine.gpus().advice


@pytest.mark.parametrize(
    ("version", "cuda", "driver", "fine", "words"),
    [
        ("2.13.0+cpu", None, False, True, "built for the CPU"),
        ("2.13.0", "13.0", False, True, "only uses disk space"),
        ("2.13.0+cpu", None, True, False, "but this machine has GPUs"),
        ("2.13.0", "13.0", True, True, "CUDA 13.0"),
    ],
)
def test_the_build_of_torch_is_held_against_the_gpus(
    monkeypatch: pytest.MonkeyPatch, version: str, cuda: Any, driver: bool, fine: bool, words: str
) -> None:
    import torch

    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(Path, "glob", lambda path, pattern: iter([path] if driver else []))
    found = _software.torch_build()
    assert found.fine == fine and words in found.told
    assert found.fine or found.needed_for == "nothing"


def test_gpus_are_named_with_whether_ranks_may_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda each: "NVIDIA Fast")
    monkeypatch.setattr("course_lib.ranks.for_graders.nccl_version", lambda: (2, 27))
    told = _machine.gpus().told
    assert told == f"1: NVIDIA Fast; {share(2, 1, (2, 27)).why}"


def test_full_disks_and_little_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(2**40, 2**40, 2**20))
    assert "free some space" in _machine.disk().advice
    monkeypatch.setattr(_machine, "_available", lambda: 2**29)
    assert _machine.memory().told.startswith("0.5 GiB") and _machine.memory().advice
    monkeypatch.setattr(_machine, "_available", lambda: None)
    assert _machine.memory().fine
    monkeypatch.setattr(_machine.os, "access", lambda *_: False)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(2**40, 0, 2**40))
    assert "--desk" in _machine.disk().advice and "HOME=" in _machine.home().advice


def test_what_the_network_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    found = _machine.host_name()
    assert "/etc/hosts" in found.advice and found.needed_for == "nothing"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert _machine.loopback().advice == "unset GLOO_SOCKET_IFNAME"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(_machine, "_reaches_itself", lambda: False)
    assert "ip link set lo up" in _machine.loopback().advice
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(2, "eth0")])
    assert "ip link set lo up" in _machine.loopback().advice


def test_a_taken_port_is_no_trouble() -> None:
    with socket.socket() as other:
        with contextlib.suppress(OSError):  # taken by somebody else: just as good
            other.bind(("127.0.0.1", 8888))
        assert _machine.port().fine and "next free" in _machine.port().told


@pytest.mark.parametrize("root", [True, False])
def test_forbidden_namespaces_are_named_with_the_setting(
    monkeypatch: pytest.MonkeyPatch, root: bool
) -> None:
    monkeypatch.setattr(_sandbox.sys, "platform", "linux")
    monkeypatch.setattr(_sandbox.os, "geteuid", lambda: 0 if root else 1000)
    monkeypatch.setattr(
        Path, "read_text", lambda path: "0\n" if "max_user" in path.name else "none\n"
    )
    found = _sandbox.namespaces()
    assert found.fine == root and "user.max_user_namespaces is 0" in found.told
    assert root or found.advice.endswith("user.max_user_namespaces=10000")


def test_without_bubblewrap_only_grading_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from autograder.sandbox import binary

    monkeypatch.setattr(_sandbox.sys, "platform", "linux")
    monkeypatch.setattr(binary, "candidates", list)
    monkeypatch.setattr("autograder.sandbox.bubblewrap.probe", lambda: binary.choose(print))
    found = _sandbox.bubblewrap()
    assert "'bwrap' is missing" in found.told and found.needed_for == "grading"


def test_off_linux_there_is_no_grading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sandbox, "sys", types.SimpleNamespace(platform="darwin"))
    for look in (_sandbox.namespaces, _sandbox.bubblewrap, _sandbox.control_groups):
        assert not look().fine and look().needed_for != "course"
