"""Hard limits of a sandbox: processes, memory, files."""

import resource
from dataclasses import dataclass

from autograder.sandbox.binary import tool


@dataclass(frozen=True)
class Limits:
    """Hard limits, set inside the sandbox before the command runs; nothing inside can raise them.

    Attributes:
        processes: processes and threads together. Before Linux 5.14, where an ordinary user opens
            the sandbox, that user's other processes count as well.
        address_space: bytes of virtual memory of each process, far more than it touches. ``None``
            where CUDA is used, which reserves all there is.
        file_size: bytes of the largest file a process may write.
        open_files: descriptors of each process.
        tmp: bytes in ``/tmp``, and as many again in ``/dev/shm``.
    """

    processes: int = 256
    address_space: int | None = 8 * 2**30
    file_size: int = 64 * 2**20
    open_files: int = 1024
    tmp: int = 256 * 2**20

    def prelude(self) -> list[str]:
        """Return the start of a command line that sets the limits and runs what follows.

        Raises:
            SandboxUnavailable: a program that sets them is missing.
        """
        wanted = {
            "nproc": (resource.RLIMIT_NPROC, self.processes),
            "as": (resource.RLIMIT_AS, self.address_space),
            "fsize": (resource.RLIMIT_FSIZE, self.file_size),
            "nofile": (resource.RLIMIT_NOFILE, self.open_files),
            "core": (resource.RLIMIT_CORE, 0),
        }
        options = []
        for name, (number, value) in wanted.items():
            if value is not None:
                hard = resource.getrlimit(number)[1]  # asking for more would fail
                options.append(f"--{name}={value if hard < 0 else min(value, hard)}")
        return [tool("choom"), "-n", "1000", "--", tool("prlimit"), *options, "--"]
