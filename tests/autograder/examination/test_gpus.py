"""What a sandbox needs for GPUs; the GPUs themselves are `make gpu`'s."""

import torch

from autograder.examination.gpus import gpu_access


def test_what_cuda_needs_goes_in_and_nothing_else(monkeypatch):
    variables = {"CUDA_VISIBLE_DEVICES": "MIG-1b2c", "NVIDIA_VISIBLE_DEVICES": "all"}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in {**variables, "GRADER_TOKEN": "secret"}.items():
        monkeypatch.setenv(name, value)
    mounts, environment = gpu_access()
    assert all(mount.device for mount in mounts)
    assert variables.items() <= environment.items()
    assert not {"GRADER_TOKEN", "HOME"} & environment.keys()
