"""What a sandbox needs for GPUs; the GPUs themselves are `make gpu`'s."""

from pathlib import Path

import pytest
import torch

from autograder.examination.gpus import gpu_access, gpu_environment


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
