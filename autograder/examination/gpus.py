"""The GPUs of this machine, in a sandbox."""

from __future__ import annotations

from pathlib import Path

import torch

from autograder.sandbox.mounts import Mount
from autograder.sandbox.unavailable import SandboxUnavailable


class GpusUnavailable(SandboxUnavailable):
    """GPU ranks were asked for, but there is no GPU."""

    def __init__(self) -> None:
        self.reason = (
            "GPU ranks were asked for, but PyTorch sees no GPU here. Ask for CPU ranks, or for no "
            "real ranks at all: the grader's own network needs no GPU."
        )
        RuntimeError.__init__(self, self.reason)


def gpu_mounts() -> list[Mount]:
    """Return the mounts that CUDA needs besides the system: the driver's devices.

    Raises:
        GpusUnavailable: PyTorch sees no GPU here.

    """
    if torch.cuda.device_count() == 0:
        raise GpusUnavailable
    found = [path for path in sorted(Path("/dev").glob("nvidia*")) if path.is_char_device()]
    found += sorted(Path("/dev/nvidia-caps").glob("*"))
    return [Mount(path, path, device=True) for path in found]
