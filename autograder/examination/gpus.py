"""Show GPUs to student code in the sandbox, and let only one grader at a time use each GPU."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from autograder.errors import SandboxUnavailable
from autograder.sandbox.bubblewrap import HardLimits
from autograder.sandbox.mounts import Mount

_NAMES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "LD_LIBRARY_PATH")
"""Variables by which CUDA finds a GPU, a part of one (MIG), or the driver's libraries."""
_SYSTEM = ("/usr", "/lib", "/lib64")
"""Folders that every sandbox shows."""
_MEMORY_PER_RANK = 2**30
"""Bytes of the host's memory that a CUDA context and NCCL take on top of a CPU rank."""
_MOST_RANKS = 4
_SHM = 2**30
"""Bytes in ``/dev/shm``: NCCL's ranks on one machine exchange data there."""


class GpusUnavailable(SandboxUnavailable):
    """GPU ranks were requested, but there is no GPU."""

    def __init__(self) -> None:
        self.reason = (
            "GPU ranks were asked for, but PyTorch sees no GPU here. Use --on cpu, or leave --on "
            "out: the grader's own network needs no GPU."
        )
        RuntimeError.__init__(self, self.reason)


@dataclass(frozen=True)
class GpuAccess:
    """The mounts and variables that let a sandbox's cells use GPUs. By default there are none."""

    mounts: tuple[Mount, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    def room(self, limits: HardLimits) -> HardLimits:
        """Return `limits` with the additional memory that ranks on GPUs take."""
        memory = limits.memory + _MOST_RANKS * _MEMORY_PER_RANK
        return replace(limits, memory=memory, shm=max(limits.shm, _SHM))


def gpu_access() -> GpuAccess:
    """Return the driver's devices, variables and libraries that CUDA needs in a sandbox.

    Raises:
        GpusUnavailable: PyTorch sees no GPU here.

    """
    if torch.cuda.device_count() == 0:
        raise GpusUnavailable
    devices = [path for path in sorted(Path("/dev").glob("nvidia*")) if path.is_char_device()]
    devices += sorted(Path("/dev/nvidia-caps").glob("*"))
    environment = gpu_environment(os.environ)
    folders = [Path(each) for each in environment.get("LD_LIBRARY_PATH", "").split(":") if each]
    libraries = [
        folder
        for folder in dict.fromkeys(folders)
        if folder.is_dir() and not any(folder.is_relative_to(each) for each in _SYSTEM)
    ]
    mounts = [Mount(path, path, device=True) for path in devices]
    mounts += [Mount(path, path) for path in libraries]
    return GpuAccess(tuple(mounts), environment)


def gpu_environment(environment: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    """Return the variables among these that CUDA and NVIDIA's container tools read."""
    return {
        name: value
        for name, value in environment.items()
        if name in _NAMES or name.startswith("NVIDIA_")
    }


@contextlib.contextmanager
def alone_on(devices: Sequence[str]) -> Iterator[None]:
    """Lock the GPUs among `devices` (``cuda:0``) so that no other grader on this machine uses them.

    Two cases on one GPU at the same time would compete for its memory and slow each other down.
    A case that waits here has started no rank yet, so none of the student's time passes.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    numbers = sorted({int(each.partition(":")[2] or 0) for each in devices if "cuda" in each})
    with contextlib.ExitStack() as held:
        for number in numbers:
            name = visible[number].strip() if number < len(visible) and visible[0] else str(number)
            path = Path(tempfile.gettempdir(), f"sgd-to-ddp-gpu-{name.replace('/', '-')}.lock")
            if not path.exists():
                path.touch()
            lock = held.enter_context(path.open())  # read only: another user may own the file
            fcntl.flock(lock, fcntl.LOCK_EX)  # closing the file releases the lock
        yield
