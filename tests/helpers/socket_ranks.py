"""Ranks that are processes, on a fabric behind sockets: `run` and `trace` as those of `Ranks`."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from course_lib.ranks.calls import per_rank
from course_lib.ranks.costs.network import Network
from course_lib.ranks.explain.errors import RanksError
from course_lib.ranks.explain.failure import timed_out
from course_lib.ranks.ranks import Ranks
from course_lib.ranks.simulated.socket_client import FabricStopped, fabric_rank
from course_lib.ranks.simulated.socket_server import FabricServer
from course_lib.ranks.trace.trace import Trace


def serve(server: FabricServer, timeout: float = 300.0) -> None:
    """Serve a whole run; raise its error, if something went wrong."""
    until = time.monotonic() + timeout
    try:
        while not server.over:
            if time.monotonic() > until:
                raise timed_out("run", timeout, server.states())
            server.turn(0.1)
        if (error := server.outcome()) is not None:
            raise error
    finally:
        server.close()


class Serving(threading.Thread):
    """A thread that serves a run; `error` is what `serve` raised."""

    def __init__(self, server: FabricServer, timeout: float = 300.0) -> None:
        super().__init__(daemon=True)
        self.server, self.timeout = server, timeout
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            serve(self.server, self.timeout)
        except BaseException as error:
            self.error = error


def on_rank(path: str, world_size: int, rank: int, fn: Callable[..., Any], *args: Any) -> Any:
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(path)
    channel.sendall(bytes([rank]))
    # FabricStopped must not outlive the call: what the server says is what counts.
    with contextlib.suppress(FabricStopped), fabric_rank(channel, rank, world_size):
        return fn(*args)


class SocketRanks:
    def __init__(self, processes: Ranks, network: Network | None = None) -> None:
        self._processes = processes
        self._k = processes.world_size
        self._network = network or Network(20e-6, 10e9)
        self.trace = Trace([], self._k)

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        serving: list[Serving] = []
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
            path = str(Path(folder) / "fabric")
            listener.bind(path)
            listener.listen(self._k)

            def accept() -> None:
                channels = [listener.accept()[0] for _ in range(self._k)]
                channels.sort(key=lambda channel: channel.recv(1))
                serving.append(Serving(FabricServer(channels, self._network)))

            accepting = threading.Thread(target=accept, daemon=True)
            accepting.start()
            ranks, failure = per_rank(range(self._k)), None
            try:
                results = self._processes.run(on_rank, path, self._k, ranks, fn, *args)
            except RanksError as error:
                failure = error
            accepting.join(30)
        serving[0].join(30)
        if serving[0].error is not None:
            raise serving[0].error from failure
        if failure is not None:
            raise failure
        self.trace = Trace(serving[0].server.fabric.events, self._k)
        return results
