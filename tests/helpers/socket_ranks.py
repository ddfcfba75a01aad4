"""Ranks that are processes, on a fabric behind a socket: `run` and `trace` as those of `Ranks`."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from course_lib.ranks.calls import per_rank
from course_lib.ranks.costs.network import Network
from course_lib.ranks.explain.errors import RanksError
from course_lib.ranks.ranks import Ranks
from course_lib.ranks.simulated.socket_client import FabricStopped, fabric_rank
from course_lib.ranks.simulated.socket_server import FabricServer
from course_lib.ranks.trace.trace import Trace


def on_rank(
    path: str, world_size: int, mine: tuple[int, bytes], fn: Callable[..., Any], *args: Any
) -> Any:
    # FabricStopped must not outlive the call: what the server says is what counts.
    with contextlib.suppress(FabricStopped), fabric_rank(path, mine[0], world_size, mine[1]):
        return fn(*args)


class SocketRanks:
    def __init__(self, processes: Ranks, network: Network | None = None) -> None:
        self._processes = processes
        self._k = processes.world_size
        self._network = network or Network(20e-6, 10e9)
        self.trace = Trace([], self._k)

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "fabric")
            server = FabricServer(path, self._k, self._network)
            outcome: list[RanksError] = []
            failure: RanksError | None = None

            def serve() -> None:
                try:
                    server.serve(timeout=300, alive=lambda: failure is None)
                except RanksError as error:
                    outcome.append(error)

            thread = threading.Thread(target=serve, daemon=True)
            thread.start()
            results: list[Any] = []
            try:
                mine = per_rank(enumerate(server.secrets))
                results = self._processes.run(on_rank, path, self._k, mine, fn, *args)
            except RanksError as error:
                failure = error
            thread.join(30)
            if outcome:
                raise outcome[0] from failure
            if failure is not None:
                raise failure
            self.trace = Trace(server.fabric.events, self._k)
            return results
