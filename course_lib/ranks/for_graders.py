"""The inner names of `ranks` for code that grades: checks, autograder, race; and for the doctor.

All other code may import from `ranks` only its public names, `explain`, `costs` and `trace`. The
rest may change.
"""

from typing import TYPE_CHECKING

from course_lib._later import later

if TYPE_CHECKING:
    from course_lib.ranks._torch.collective_table import KINDS, Collective, reduction_of, why_not
    from course_lib.ranks._torch.python_group import PythonGroup, watched_by
    from course_lib.ranks._torch.thread_worlds import current, here
    from course_lib.ranks.calls import (
        Sources,
        cell_sources,
        install_sources,
        pack_call,
    )
    from course_lib.ranks.memory import pack
    from course_lib.ranks.placement import nccl_version, place, share
    from course_lib.ranks.processes.fork_client import (
        WIDE,
        ForkServer,
        ForkServerError,
        end_soon,
        preload,
    )
    from course_lib.ranks.processes.fork_server import collapse, serve
    from course_lib.ranks.processes.worker import redirect_output
    from course_lib.ranks.simulated.fabric_diagnosis import explain_misuse
    from course_lib.ranks.simulated.handles import MAX_MISUSES, Misuse
    from course_lib.ranks.simulated.operation import Operation, check_tensors
    from course_lib.ranks.simulated.socket_client import FabricClient, FabricStopped, fabric_rank
    from course_lib.ranks.simulated.socket_frames import Bounds
    from course_lib.ranks.simulated.socket_server import FabricServer

__all__ = [
    "KINDS",
    "MAX_MISUSES",
    "WIDE",
    "Bounds",
    "Collective",
    "FabricClient",
    "FabricServer",
    "FabricStopped",
    "ForkServer",
    "ForkServerError",
    "Misuse",
    "Operation",
    "PythonGroup",
    "Sources",
    "cell_sources",
    "check_tensors",
    "collapse",
    "current",
    "end_soon",
    "explain_misuse",
    "fabric_rank",
    "here",
    "install_sources",
    "nccl_version",
    "pack",
    "pack_call",
    "place",
    "preload",
    "redirect_output",
    "reduction_of",
    "serve",
    "share",
    "watched_by",
    "why_not",
]

# Each part is loaded at its first use. For example, a sandbox is started without a fabric.
__getattr__ = later(
    __name__,
    {
        "KINDS Collective reduction_of why_not": "_torch.collective_table",
        "PythonGroup watched_by": "_torch.python_group",
        "current here": "_torch.thread_worlds",
        "Sources cell_sources install_sources pack_call": "calls",
        "pack": "memory",
        "nccl_version place share": "placement",
        "WIDE ForkServer ForkServerError end_soon preload": "processes.fork_client",
        "collapse serve": "processes.fork_server",
        "redirect_output": "processes.worker",
        "explain_misuse": "simulated.fabric_diagnosis",
        "MAX_MISUSES Misuse": "simulated.handles",
        "Operation check_tensors": "simulated.operation",
        "FabricClient FabricStopped fabric_rank": "simulated.socket_client",
        "Bounds": "simulated.socket_frames",
        "FabricServer": "simulated.socket_server",
    },
)
