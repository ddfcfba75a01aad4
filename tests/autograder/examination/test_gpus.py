"""What a sandbox needs for GPUs; the GPUs themselves are `make gpu`'s."""

import torch

from autograder.examination.gpus import gpu_access


def test_what_cuda_needs_goes_in_and_nothing_else(monkeypatch, tmp_path):
    variables = {
        "CUDA_VISIBLE_DEVICES": "MIG-1b2c",
        "NVIDIA_VISIBLE_DEVICES": "all",
        "LD_LIBRARY_PATH": f"/usr/lib:{tmp_path}:/does/not/exist:{tmp_path}",
    }
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in {**variables, "GRADER_TOKEN": "secret"}.items():
        monkeypatch.setenv(name, value)
    mounts, environment = gpu_access()
    assert [mount.target for mount in mounts if not mount.device] == [tmp_path]
    assert variables.items() <= environment.items()
    assert not {"GRADER_TOKEN", "HOME"} & environment.keys()
