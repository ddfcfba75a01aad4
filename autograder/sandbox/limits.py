"""Hard limits of a sandbox: processes, memory, files."""

import resource
from dataclasses import dataclass

from autograder.sandbox.binary import tool


@dataclass(frozen=True)
class Limits:
    """Hard limits, set inside the sandbox before the command runs; nothing inside can raise them.

    Attributes:
        processes: processes and threads together. Before Linux 5.14, if an ordinary user opens
            the sandbox, that user's other processes count too.
        address_space: bytes of virtual memory of each process, far more than it touches. ``None``
            with CUDA, which reserves all there is.
        file_size: bytes of the largest file a process may write.
        open_files: descriptors of each process.
        tmp: bytes in ``/tmp``; in a sandbox without cells the same again in ``/dev/shm``.
        shm: bytes in a cell's ``/dev/shm``.
        memory: bytes that all processes of a submission may hold together.
    """

    processes: int = 256
    address_space: int | None = 8 * 2**30
    file_size: int = 64 * 2**20
    open_files: int = 1024
    tmp: int = 256 * 2**20
    shm: int = 64 * 2**20
    memory: int = 3 * 2**30

    def of_a_cell(self) -> dict[str, int]:
        """Return the limits of each process in a cell, by their names in `resource`."""
        limits = {
            "nproc": self.processes,
            "as": self.address_space,
            "fsize": self.file_size,
            "nofile": self.open_files,
            "core": 0,
        }
        return {name: value for name, value in limits.items() if value is not None}

    def prelude(self) -> list[str]:
        """Return the start of a command line that sets the limits and runs what follows.

        Raises:
            SandboxUnavailable: a program that sets them is missing.
        """
        options = []
        for name, value in self.of_a_cell().items():
            hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[1]
            options.append(f"--{name}={value if hard < 0 else min(value, hard)}")  # more would fail
        return [tool("choom"), "-n", "1000", "--", tool("prlimit"), *options, "--"]
