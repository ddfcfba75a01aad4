"""Show GPUs to student code in the sandbox."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch

from autograder.errors import SandboxUnavailable
from autograder.sandbox.bubblewrap import HardLimits
from autograder.sandbox.mounts import Mount

_NAMES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "LD_LIBRARY_PATH")
"""Variables by which CUDA finds a GPU, a part of one (MIG), or the driver's libraries."""
_MEMORY_PER_RANK = 2**30
"""Bytes of the host's memory that a CUDA context and NCCL take on top of a CPU rank."""
_MOST_RANKS = 4
_SHM = 2**30
"""Bytes in ``/dev/shm``: NCCL's ranks on one machine exchange data there."""


def with_gpus(limits: HardLimits) -> HardLimits:
    """Return `limits` with the additional memory that ranks on GPUs take."""
    memory = limits.memory + _MOST_RANKS * _MEMORY_PER_RANK
    return replace(limits, memory=memory, shm=max(limits.shm, _SHM))


def gpu_access() -> tuple[list[Mount], dict[str, str]]:
    """Return the mounts and the variables that let a sandbox's cells use GPUs.

    These are the driver's devices, and the variables that CUDA and NVIDIA's container tools read.
    The driver's libraries are in the system's folders, which every sandbox shows.

    Raises:
        SandboxUnavailable: PyTorch sees no GPU here.

    """
    if torch.cuda.device_count() == 0:
        raise SandboxUnavailable(
            "GPU ranks were asked for, but PyTorch sees no GPU here. Use --on cpu, or leave --on "
            "out: the grader's own network needs no GPU."
        )
    devices = [path for path in sorted(Path("/dev").glob("nvidia*")) if path.is_char_device()]
    devices += sorted(Path("/dev/nvidia-caps").glob("*"))
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in _NAMES or name.startswith("NVIDIA_")
    }
    return [Mount(path, path, device=True) for path in devices], environment
