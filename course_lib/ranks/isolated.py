"""Simulated ranks as processes: the engine behind ``on="simulated", isolated=True``.

Threads share most of what a process has once: the environment, the working folder, imported
modules. If that matters, each rank can be a process of its own. The fabric runs in a thread of this
process, at the other end of a socket. A call costs some milliseconds more, and every message must
also pass through the socket.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from course_lib.ranks.calls import Call, CallOptions, cell_labels, per_rank
from course_lib.ranks.costs.network import Network
from course_lib.ranks.explain.errors import RankError, RanksError
from course_lib.ranks.placement import Placement, place
from course_lib.ranks.processes.board import MAX_BOARD_RANKS
from course_lib.ranks.processes.team import Processes
from course_lib.ranks.simulated.fabric_diagnosis import fabric_states, report_misuse
from course_lib.ranks.simulated.handles import Misuse
from course_lib.ranks.simulated.socket_client import FabricStopped, fabric_rank
from course_lib.ranks.simulated.socket_server import FabricServer
from course_lib.ranks.simulated.virtual_time import virtual_time
from course_lib.ranks.trace.trace import Trace

_DAY = 86_400.0


class IsolatedSimulated:
    """K simulated ranks, each a process that stays between calls.

    Args:
        world_size: K.
        network: what messages cost; by default 20 µs and 10 GB/s.
        misuse: what happens when handles are misused: ``"warn"`` or ``"error"``.

    """

    def __init__(
        self, world_size: int, network: Network | None = None, misuse: str = "warn"
    ) -> None:
        if not isinstance(world_size, int) or not 1 <= world_size <= MAX_BOARD_RANKS:
            raise ValueError(
                f"world_size must be 1 to {MAX_BOARD_RANKS} with isolated=True, got {world_size!r}"
            )
        self.placement = Placement(
            ("simulated",) * world_size, "fabric", "simulated, virtual clock, a process per rank"
        )
        self.trace = Trace([], world_size)
        self._world_size = world_size
        self._misuse = misuse
        self._network = network or Network(latency=20e-6, bandwidth=10e9)
        self._processes = Processes(place(world_size, "cpu"), metered=False)
        self.closing = self._processes.closing

    def run(self, call: Call) -> list[Any]:
        """Run one call; see `Ranks.run`."""
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "fabric")
            server = FabricServer(path, self._world_size, self._network)
            found: list[RanksError] = []
            ended = threading.Event()

            def serve() -> None:
                try:
                    server.serve(call.options.timeout or _DAY, alive=lambda: not ended.is_set())
                except RanksError as error:
                    found.append(error)

            serving = threading.Thread(target=serve, daemon=True)
            serving.start()
            try:
                mine = per_rank(enumerate(server.secrets))
                job = _Job(path, self._world_size, cell_labels(), call.options)
                # The ranks look for NaN themselves: these processes have no meter.
                unmetered = replace(call.options, check_nan=False)
                inner = Call(_on_rank, (job, mine, call.fn, *call.args), call.kwargs, unmetered)
                replies = self._processes.run(inner)
            except BaseException as error:
                ended.set()
                serving.join()
                # A rank's own exception says more than the fabric, which only saw the rank end.
                told = found and not isinstance(found[0], RankError)
                if told and isinstance(error, RanksError):
                    raise found[0] from None
                raise
            finally:
                self.trace = Trace(server.fabric.events, self._world_size)
            serving.join()
        if found:
            raise found[0]
        misused = [each for _, of_rank in replies for each in of_rank]
        report_misuse(misused, self._misuse, fabric_states(server.fabric))
        return [value for value, _ in replies]

    def start(self) -> None:
        """See `Ranks.start`."""
        self._processes.start()

    def pids(self) -> list[int]:
        """Return the ranks' processes, in rank order."""
        return self._processes.pids()

    def close(self) -> None:
        """End the ranks' processes."""
        self._processes.close()


@dataclass(frozen=True)
class _Job:
    """The data that a process needs to be a rank."""

    path: str
    world_size: int
    labels: dict[str, str]
    options: CallOptions


def _on_rank(
    job: _Job, mine: tuple[int, bytes], fn: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> tuple[Any, list[Misuse]]:
    rank, secret = mine
    # FabricStopped must not leave this function: the server's own error is the one to report.
    with (
        contextlib.suppress(FabricStopped),
        virtual_time(),
        fabric_rank(job.path, rank, job.world_size, secret, job.labels) as client,
    ):
        assert client.context is not None
        client.context.options = job.options
        value = fn(*args, **kwargs)
        client.context.finish()
        return value, client.context.handles.found
    return None, []
