"""Run notebook functions on several ranks at once.

    >>> from course_lib.ranks import Ranks, per_rank
    >>> with Ranks(4) as ranks:
    ...     results = ranks.run(fn, per_rank(shards), lr=0.1)

The parts of this package, from the bottom up. Each one imports only parts above it in this list:

- `explain`: failures in words; `costs`: the time of messages and computation; `placement`: which
  device each rank gets; `variables`: what ranks keep between calls; `stopping`: how code is
  interrupted from outside; `wire`: plain values as bytes, on sockets
- `trace`: what happened; `memory`: objects as bytes, and memory that processes share
- `calls`: how a function is sent to ranks
- `_torch`: what PyTorch does not document, and the table of collectives
- `output`: what ranks print and display
- `processes`: ranks as processes of this machine; `simulated`: ranks on the fabric, a network with
  a virtual clock; neither imports the other
- `host`: the process whose threads are the simulated ranks
- `ranks`: the class `Ranks`, which chooses between these kinds of ranks
- `watch`: hangs of any ``torchrun`` job, explained
- `notebook`: `%%ranks`, and the kernel that has it loaded
- `for_graders`: the inner names that checks and the autograder may import
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
        MisuseWarning,
        RankError,
        RanksError,
        RankState,
        RankTimeout,
    )
    from course_lib.ranks.ranks import Ranks
    from course_lib.ranks.trace.event import Event
    from course_lib.ranks.trace.trace import Trace

# Start the fork server before anything here loads PyTorch. It also loads PyTorch and takes longest.
start_in_notebook()

# Names that need PyTorch are loaded at their first use. `costs` does not need PyTorch.
__getattr__, __dir__ = later(
    __name__,
    {
        "per_rank": "calls",
        "clock compute": "costs.computation",
        "DeadlockError MismatchError MisuseWarning": "explain.errors",
        "RankError RanksError RankState RankTimeout": "explain.errors",
        "Ranks": "ranks",
        "Event": "trace.event",
        "Trace": "trace.trace",
    },
)
