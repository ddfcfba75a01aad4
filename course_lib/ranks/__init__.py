"""Run notebook functions on several ranks at once.

    >>> from course_lib.ranks import Ranks, per_rank
    >>> with Ranks(4) as ranks:
    ...     results = ranks.run(fn, per_rank(shards), lr=0.1)

From the ground up; each room knows only those above it in this list:

- `explain`: failures in words; `costs`: what messages and computation take; `calls`: how a function
  travels; `placement`: which devices; `variables`: what ranks keep between calls; `stopping`: what
  ends their code from outside; `sockets`: what travels through sockets
- `trace`: what happened; `memory`: objects as bytes, and what processes share
- `_torch`: what PyTorch does not document, and the table of collectives
- `output`: what ranks print and display
- `processes`: ranks as processes of this machine; `simulated`: ranks on a network with a virtual
  clock, the fabric; neither knows the other
- `isolated`: processes whose network is a fabric
- `engine`: which of them runs the calls; `ranks`: `Ranks`, their face; `multinode`: on several
  machines; `flight_recorder`: the dumps of PyTorch's recorder, explained
- `watch`: hangs of any ``torchrun`` job, explained
- `notebook`: `%%ranks`, and the kernel that has it loaded
- `for_graders`: what those who grade take from inside
"""

from typing import TYPE_CHECKING

from course_lib._later import later
from course_lib.ranks.costs.network import Device, Network
from course_lib.ranks.processes.fork_client import start_in_notebook

if TYPE_CHECKING:
    from course_lib.ranks.calls import per_rank
    from course_lib.ranks.costs.computation import clock, compute
    from course_lib.ranks.explain.errors import (
        DeadlockError,
        MismatchError,
        MisuseError,
        MisuseWarning,
        RankError,
        RanksError,
        RankState,
        RankTimeout,
    )
    from course_lib.ranks.ranks import Ranks
    from course_lib.ranks.trace.event import Event
    from course_lib.ranks.trace.trace import Trace

__all__ = [
    "DeadlockError",
    "Device",
    "Event",
    "MismatchError",
    "MisuseError",
    "MisuseWarning",
    "Network",
    "RankError",
    "RankState",
    "RankTimeout",
    "Ranks",
    "RanksError",
    "Trace",
    "clock",
    "compute",
    "per_rank",
]

# Now, before anything here loads PyTorch: it takes longest, and loads PyTorch, too.
start_in_notebook()

# Names that need PyTorch are loaded when somebody asks for them. Costs do not need it.
__getattr__ = later(
    __name__,
    {
        "per_rank": "calls",
        "clock compute": "costs.computation",
        "DeadlockError MismatchError MisuseError MisuseWarning": "explain.errors",
        "RankError RanksError RankState RankTimeout": "explain.errors",
        "Ranks": "ranks",
        "Event": "trace.event",
        "Trace": "trace.trace",
    },
)
