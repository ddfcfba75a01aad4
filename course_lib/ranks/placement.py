"""Choose where the ranks run: one GPU each, shared GPUs, or the CPU."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch

from course_lib.cores import usable_cores

_SHARING_NCCL = (2, 30)
"""The first release of NCCL that allows two ranks on one GPU."""
_BLOCKS_PER_GPU = 16
"""Thread blocks of NCCL's kernels on a shared GPU, for all its ranks together. The kernels of all
ranks must run at the same time. Otherwise the running ones wait forever for the others."""


@dataclass(frozen=True)
class Placement:
    """A device for every rank, and the backend through which the ranks communicate."""

    devices: tuple[str, ...]
    backend: str
    """``gloo`` or ``nccl``; for simulated ranks, ``fabric``."""
    why: str
    """The reason for this choice: one sentence for a person."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables that the ranks need."""

    @property
    def threads(self) -> int:
        """Threads per rank: the cores of this machine, divided among the ranks."""
        return max(1, usable_cores() // len(self.devices))


def place(world_size: int, on: str) -> Placement:
    """Return where `world_size` ranks run with ``on="auto"``, ``"cpu"`` or ``"gpu"``.

    Raises:
        ValueError: `on` is none of these, or is ``"gpu"`` and there is no GPU.

    """
    if on not in ("auto", "cpu", "gpu"):
        raise ValueError(f'on must be "auto", "cpu", "gpu" or "simulated", got {on!r}')
    gpus = 0 if on == "cpu" else torch.cuda.device_count()
    if gpus >= world_size:
        devices = tuple(f"cuda:{rank}" for rank in range(world_size))
        return Placement(devices, "nccl", "one GPU per rank, NCCL")
    if on == "gpu":
        return share(world_size, gpus, nccl_version())
    cpus = ("cpu",) * world_size
    if on == "cpu" or gpus == 0:
        return Placement(cpus, "gloo", "CPU processes, gloo")
    gpus_seen = f"{gpus} GPU{'s' * (gpus > 1)} for {world_size} ranks"
    reason = f'only {gpus_seen}, so CPU processes, gloo; with on="gpu" the ranks share GPUs'
    return Placement(cpus, "gloo", reason)


def share(world_size: int, gpus: int, nccl: tuple[int, ...]) -> Placement:
    """Return how `world_size` ranks share a smaller number of `gpus` with this NCCL version."""
    if gpus == 0:
        raise ValueError(
            'on="gpu" needs a GPU, and PyTorch sees none here. '
            'Use on="auto" or on="cpu" to run on the CPU.'
        )
    devices = tuple(f"cuda:{rank % gpus}" for rank in range(world_size))
    version = ".".join(map(str, nccl))
    shared = f"{world_size} ranks share {gpus} GPU{'s' * (gpus > 1)}"
    if nccl >= _SHARING_NCCL:
        reason = f"{shared}; NCCL {version} allows it"
        blocks = max(1, _BLOCKS_PER_GPU // -(-world_size // gpus))
        shares = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": str(blocks)}
        return Placement(devices, "nccl", reason, shares)
    obstacle = f"NCCL {version} does not allow it" if version else "there is no NCCL"
    reason = f"{shared}; {obstacle}, so they communicate through the CPU, with gloo"
    reason += "; with metered=False, send and recv fail for tensors on a GPU"
    return Placement(devices, "gloo", reason)


def nccl_version() -> tuple[int, ...]:
    """Return the version of NCCL that will run; empty if there is none.

    PyTorch only knows the version that it was built with. A different one may be installed.
    """
    try:
        library = ctypes.CDLL("libnccl.so.2")
        number = ctypes.c_int()
        library.ncclGetVersion(ctypes.byref(number))
        return (number.value // 10000, number.value // 100 % 100, number.value % 100)
    except (OSError, AttributeError):
        pass
    try:  # linked into PyTorch itself
        return tuple(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError):
        return ()
