"""The fork server's process: what it loads, when, and in which environment."""

from __future__ import annotations

import os
import subprocess
import sys

NARROW = ("torch", "torch.distributed", "cloudpickle", "course_lib.ranks.processes.worker")
"""What a rank needs in any case."""

SOON = (
    "torch.fx.experimental.symbolic_shapes",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "torch.nn.parallel.distributed",
    "torch.optim.adamw",
    "torch.distributed.device_mesh",
)
"""What a rank would otherwise import in its first training step, for seconds; in an order in which
each takes its part of them."""

WIDE = (*NARROW, *SOON)

LATER = (
    "matplotlib.pyplot",
    "matplotlib.backends.backend_agg",
    "IPython.core.interactiveshell",
)
"""What few ranks need: not worth waiting for at the first start."""


def launch(fd: int) -> subprocess.Popen[bytes]:
    """Start the fork server, which inherits the socket `fd`."""
    return subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-m",
            "course_lib.ranks.processes.fork_server",
            str(fd),
            *NARROW,
            "--",
            *SOON,
            "--",
            *LATER,
        ],
        pass_fds=[fd],
        stdin=subprocess.DEVNULL,
        env=_environment(),
        start_new_session=True,  # an interrupt at the terminal is ours to handle
    )


def _environment() -> dict[str, str]:
    loopback = "lo" if sys.platform == "linux" else "lo0"
    return {
        **os.environ,
        # One thread after the imports, or the fork would lose the others.
        "OPENBLAS_NUM_THREADS": "1",
        # Ranks of one machine need no host name that resolves.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", loopback),
        "PYTHONUNBUFFERED": "1",
        # Nobody reads PyTorch's flight recorder here, which keeps the stack of every operation.
        "TORCH_FR_BUFFER_SIZE": os.environ.get("TORCH_FR_BUFFER_SIZE", "0"),
        "MPLBACKEND": "agg",
    }
