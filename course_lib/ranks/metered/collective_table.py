"""How PyTorch calls the collectives of a process group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d


@dataclass(frozen=True)
class Collective:
    """How PyTorch calls one collective of a process group."""

    name: str
    """As ``torch.distributed`` calls it."""
    method: str
    """As it is called on the process group; the options are its last argument."""
    tensors: int | None
    """Position of the argument that says what this rank puts in."""
    arguments: int
    """How many arguments there are before the options."""
    options: Callable[[], Any]
    rooted: bool = False
    reduces: bool = False
    sized: bool = True
    """Whether every rank must bring the same number of elements."""
    old_method: str = ""
    """Name of the method in releases before 2.13."""


COLLECTIVES = (
    Collective("broadcast", "broadcast", 0, 1, dist.BroadcastOptions, rooted=True),
    Collective("all_reduce", "allreduce", 0, 1, dist.AllreduceOptions, reduces=True),
    Collective(
        "all_reduce_coalesced", "allreduce_coalesced", 0, 1,
        dist.AllreduceCoalescedOptions, reduces=True,
    ),
    Collective("reduce", "reduce", 0, 1, dist.ReduceOptions, rooted=True, reduces=True),
    Collective("all_gather", "allgather", 1, 2, c10d.AllgatherOptions),
    Collective(
        "all_gather", "all_gather_single", 1, 2, c10d.AllgatherOptions,
        old_method="_allgather_base",
    ),
    Collective("all_gather_coalesced", "allgather_coalesced", 1, 2, c10d.AllgatherOptions),
    Collective("gather", "gather", 1, 2, c10d.GatherOptions, rooted=True),
    # Only the root has inputs.
    Collective("scatter", "scatter", 0, 2, c10d.ScatterOptions, rooted=True),
    Collective("reduce_scatter", "reduce_scatter", 1, 2, c10d.ReduceScatterOptions, reduces=True),
    Collective(
        "reduce_scatter", "reduce_scatter_single", 1, 2, c10d.ReduceScatterOptions,
        reduces=True, old_method="_reduce_scatter_base",
    ),
    # Uneven splits are allowed, so ranks may differ in size.
    Collective(
        "all_to_all", "all_to_all_single", 1, 4, dist.AllToAllOptions, sized=False,
        old_method="alltoall_base",
    ),
    Collective("all_to_all", "alltoall", 1, 2, dist.AllToAllOptions, sized=False),
    Collective("barrier", "barrier", None, 0, dist.BarrierOptions),
)  # fmt: skip
