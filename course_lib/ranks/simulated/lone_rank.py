"""A rank that is a process of its own, and whose fabric is somewhere else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from course_lib.ranks._torch.thread_worlds import join_world, leave_world, thread_worlds
from course_lib.ranks.costs.computation import enter_rank
from course_lib.ranks.explain.lines import locator
from course_lib.ranks.simulated.operation import Endpoint
from course_lib.ranks.simulated.simulated_group import SimulatedRank


class LoneEndpoint(Endpoint, Protocol):
    """The rank's side of its fabric."""

    def now(self) -> float:
        """Return the rank's clock, in virtual seconds, as far as the fabric reveals it."""

    def spend(self, seconds: float) -> None:
        """Compute for `seconds` of virtual time."""

    def ask(self, question: Any) -> Any:
        """Return the answer of who examines this rank; it takes virtual time."""


@contextmanager
def lone_rank(
    endpoint: LoneEndpoint, rank: int, world_size: int, labels: Mapping[str, str] | None = None
) -> Iterator[SimulatedRank]:
    """Act as a rank: inside the block, ``torch.distributed`` works.

    Args:
        endpoint: the rank's side of its fabric.
        rank: which rank this is.
        world_size: K.
        labels: file name → its name in messages for people; the mapping may grow later.

    """
    labels = {} if labels is None else labels
    context = SimulatedRank(rank, world_size, endpoint, locator(labels), labels=labels)
    with thread_worlds():
        try:
            join_world(context)
            enter_rank(endpoint.spend, endpoint.now, endpoint.ask)
            yield context
        finally:
            leave_world()
