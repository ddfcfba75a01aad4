"""What a sandbox needs for GPUs; the GPUs themselves are `make gpu`'s."""

import multiprocessing
import time
from pathlib import Path

import pytest
import torch

from autograder.examination import gpus
from autograder.examination.gpus import alone_on, gpu_access, gpu_environment


def test_the_variables_by_which_cuda_finds_a_gpu_go_in_and_no_others() -> None:
    finds = {
        "CUDA_VISIBLE_DEVICES": "MIG-1b2c",
        "NVIDIA_VISIBLE_DEVICES": "all",
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
        "LD_LIBRARY_PATH": "/opt/driver",
    }
    assert gpu_environment({**finds, "SECRET": "x", "HOME": "/home/a"}) == finds


def test_the_libraries_beside_the_system_are_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/usr/lib:{tmp_path}:/does/not/exist:{tmp_path}")
    access = gpu_access()
    assert [mount.target for mount in access.mounts if not mount.device] == [tmp_path]
    assert access.environment["LD_LIBRARY_PATH"].startswith("/usr/lib")


def hold(device: str, log: Path) -> None:
    with alone_on([device]):
        for word in ("in", "out"):
            with log.open("a") as file:
                file.write(f"{word}\n")
            time.sleep(0.5)


@pytest.mark.parametrize(
    ("second", "expected"), [("cuda:0", "in out in out"), ("cuda:1", "in in out out")]
)
def test_two_graders_do_not_use_one_gpu_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: str, expected: str
) -> None:
    monkeypatch.setattr(gpus.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    log = tmp_path / "log"
    fork = multiprocessing.get_context("fork")
    both = [fork.Process(target=hold, args=(each, log)) for each in ("cuda:0", second)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
        assert process.exitcode == 0
    assert log.read_text().split() == expected.split()
