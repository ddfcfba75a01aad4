"""Run notebook functions on several ranks at once.

    >>> from course_lib.ranks import Ranks, per_rank
    >>> with Ranks(4) as ranks:
    ...     results = ranks.run(fn, per_rank(shards), lr=0.1)

Read in this order:

- `pool`: `Ranks`, and the engines it chooses from; `placement`: which devices
- ranks that are processes: `processes` (restart), `team` (one call), `member`, `worker` (the
  rank's side), `fork_server` and `fork_client` (where ranks come from), `calls` and `channel`
  (how functions and tensors travel), `interrupts`, `memory`
- how a rank says what it does: `process_group`, `collective_table`, `work`, `events`, and the
  `board` that all of them share, read as `views`
- how that becomes a sentence: `diagnosis`, `stacks`, `failures`, `errors`
- what people see: `output`, `progress`, `rank_display`, `report`, `trace`, `timeline`,
  `trace_figure`, and the magics (`magic`, `cells`)
- slow networks on fast machines: `network`, `emulated_link`; several machines: `multinode`
- simulated ranks: `simulated`, `simulated_run`, `fabric`, and what they name
"""

from course_lib.ranks.calls import per_rank
from course_lib.ranks.computation import clock, compute
from course_lib.ranks.errors import (
    DeadlockError,
    MismatchError,
    RankError,
    RanksError,
    RankState,
    RankTimeout,
)
from course_lib.ranks.events import Event
from course_lib.ranks.network import Device, Network
from course_lib.ranks.pool import Ranks
from course_lib.ranks.trace import Trace

__all__ = [
    "DeadlockError",
    "Device",
    "Event",
    "MismatchError",
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
