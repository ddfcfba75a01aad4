"""The engines, which run the calls of a `Ranks`, and the function that chooses one of them.

`Processes` is for ``on="cpu"`` and ``"gpu"``. The ranks of `Simulated` are threads of one process,
their host, on a fabric with a virtual clock.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

from course_lib.ranks.calls import Call
from course_lib.ranks.costs.network import Device, Network
from course_lib.ranks.host import Simulated
from course_lib.ranks.placement import Placement, place
from course_lib.ranks.processes.board import MAX_BOARD_RANKS
from course_lib.ranks.processes.team import Processes
from course_lib.ranks.simulated.threads import Computation, Policy
from course_lib.ranks.trace.trace import Trace


class Engine(Protocol):
    """Runs the calls of one `Ranks`."""

    placement: Placement
    """A device for every rank, and the reason for this choice in a sentence."""
    trace: Trace
    """The trace of the last call, even if that call failed."""
    closing: threading.Event
    """Set when the ranks must end. A call that runs in another thread then raises an error."""

    def run(self, call: Call) -> list[Any]:
        """Run the call on every rank. Its arguments may be `PerRank`."""

    def start(self) -> None:
        """Start the processes of the ranks, if they have any, and do not wait for them."""

    def pids(self) -> list[int]:
        """Return the pids of the ranks; empty if the ranks have no processes of their own."""

    def close(self) -> None:
        """Free everything. A later `run` may start again from nothing."""


def make_engine(
    world_size: int,
    on: str,
    network: Network | None,
    device: Device | None,
    computation: Computation | None,
    metered: bool,
    misuse: Policy,
    owner: str,
) -> Engine:
    """Return the engine for the arguments of `Ranks`, where they are explained.

    `owner` is the key of the ranks' variables: see `variables`.

    Raises:
        ValueError: `on` is not valid, or ranks of this kind are not possible with these arguments.

    """
    if on == "simulated":
        return Simulated(world_size, owner, network, device, computation, misuse)
    if not isinstance(world_size, int) or not 1 <= world_size <= MAX_BOARD_RANKS:
        raise ValueError(f"world_size must be 1 to {MAX_BOARD_RANKS}, got {world_size!r}")
    if device is not None or computation is not None:
        raise ValueError('device=… and computation=… work only with on="simulated"')
    if network is not None:
        _check_emulated(network, on, metered)
        on = "cpu"
    return Processes(place(world_size, on), metered=metered, network=network)


def _check_emulated(network: Network, on: str, metered: bool) -> None:
    """Refuse a network that CPU ranks cannot emulate.

    They can emulate only one link per rank, of one latency and bandwidth.
    """
    if on == "gpu" or not metered:
        raise ValueError(
            'network=… works only with on="simulated", or with on="cpu" and without metered=False'
        )
    plain = Network(
        network.latency,
        network.bandwidth,
        overhead=network.overhead,
        all_reduce=network.all_reduce,
        broadcast=network.broadcast,
        segments=network.segments,
    )
    if plain != network:
        raise ValueError(
            "CPU ranks can emulate only the latency, bandwidth and overhead of one link per rank. "
            'For topologies, nodes and jitter use on="simulated"'
        )
